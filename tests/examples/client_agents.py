"""One agent for each client library, which runs them as their users do: a question, a tool, an answer.

Runs under an interpreter that has the libraries (tests/examples/test_clients.py).
"""
# mypy: ignore-errors

from __future__ import annotations

import inspect
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet at its start
MODEL = "policy"
QUESTION = "What is 2 + 3? Use the tool."
SYSTEM = "You add numbers."
SCHEMA = {
    "type": "object",
    "properties": {"one": {"type": "integer"}, "other": {"type": "integer"}},
    "required": ["one", "other"],
}
ABOUT = {"name": "add", "description": "The sum of two numbers."}
CHAT_TOOLS = [{"type": "function", "function": {**ABOUT, "parameters": SCHEMA}}]
FLAT_TOOLS = [{"type": "function", **ABOUT, "parameters": SCHEMA, "strict": False}]
ANTHROPIC_TOOLS = [{**ABOUT, "input_schema": SCHEMA}]
SECONDS = 600.0  # that a client waits for a turn


def add(one: int, other: int) -> str:
    """The sum of two numbers.

    Args:
        one: a number
        other: another number
    """
    return str(one + other)


def added(arguments: str) -> str:
    """The tool's result, for arguments in JSON of a model that may write any."""
    try:
        return add(**json.loads(arguments))
    except Exception as error:
        return f"Error: {error}"


def openai_chat(base_url: str, api_key: str) -> str:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=SECONDS)
    assert client.models.retrieve(MODEL).id == MODEL
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    while True:
        asked = {"model": MODEL, "messages": chat, "tools": CHAT_TOOLS}
        said = client.chat.completions.create(**asked).choices[0].message
        chat.append(said)
        if not said.tool_calls:
            return said.content
        for one in said.tool_calls:
            result = added(one.function.arguments)
            chat.append({"role": "tool", "tool_call_id": one.id, "content": result})


def openai_stream(base_url: str, api_key: str) -> str:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=SECONDS)
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    while True:
        asked = {"model": MODEL, "messages": chat, "tools": CHAT_TOOLS}
        with client.chat.completions.stream(
            **asked, stream_options={"include_usage": True}
        ) as stream:
            for _ in stream:
                pass
            whole = stream.get_final_completion()
        assert whole.usage.completion_tokens >= 0
        said = whole.choices[0].message
        chat.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
        if not said.tool_calls:
            return said.content
        for one in said.tool_calls:
            result = added(one.function.arguments)
            chat.append({"role": "tool", "tool_call_id": one.id, "content": result})


def openai_responses(base_url: str, api_key: str) -> str:
    """By the ids of responses, streamed."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=SECONDS)
    asked, previous = [{"role": "user", "content": QUESTION}], openai.omit
    while True:
        events = client.responses.create(
            model=MODEL,
            instructions=SYSTEM,
            input=asked,
            previous_response_id=previous,
            tools=FLAT_TOOLS,
            stream=True,
        )
        for event in events:
            if event.type in ("response.completed", "response.incomplete"):
                said = event.response
        previous, asked = said.id, []
        for one in said.output:
            if one.type == "function_call":
                result = added(one.arguments)
                output = {"type": "function_call_output", "call_id": one.call_id}
                asked.append({**output, "output": result})
        if not asked:
            return said.output_text


def anthropic_messages(base_url: str, api_key: str, stream: bool = False) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=base_url, api_key=api_key, timeout=SECONDS)
    chat = [{"role": "user", "content": QUESTION}]
    while True:
        asked = {"model": MODEL, "max_tokens": 64, "system": SYSTEM, "messages": chat}
        asked["tools"] = ANTHROPIC_TOOLS
        if stream:
            with client.messages.stream(**asked) as events:
                said = events.get_final_message()
        else:
            said = client.messages.create(**asked)
        chat.append({"role": "assistant", "content": said.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": one.id,
                "content": added(json.dumps(one.input)),
            }
            for one in said.content
            if one.type == "tool_use"
        ]
        if not results:
            return "".join(one.text for one in said.content if one.type == "text")
        chat.append({"role": "user", "content": results})


def anthropic_stream(base_url: str, api_key: str) -> str:
    return anthropic_messages(base_url, api_key, stream=True)


def litellm_chat(base_url: str, api_key: str, model: str = f"openai/{MODEL}") -> str:
    import litellm

    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    while True:
        said = litellm.completion(
            model=model,
            messages=chat,
            tools=CHAT_TOOLS,
            api_base=base_url,
            api_key=api_key,
            timeout=SECONDS,
        )
        said = said.choices[0].message
        chat.append(said.model_dump())
        if not said.tool_calls:
            return said.content
        for one in said.tool_calls:
            result = added(one.function.arguments)
            chat.append({"role": "tool", "tool_call_id": one.id, "content": result})


def litellm_anthropic(base_url: str, api_key: str) -> str:
    return litellm_chat(base_url.removesuffix("/v1"), api_key, f"anthropic/{MODEL}")


def langgraph_agent(base_url: str, api_key: str, anthropic: bool = False) -> str:
    import warnings

    warnings.simplefilter("ignore")
    from langgraph.prebuilt import create_react_agent

    if anthropic:
        from langchain_anthropic import ChatAnthropic

        model = ChatAnthropic(model=MODEL, base_url=base_url, api_key=api_key, timeout=SECONDS)
    else:
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(model=MODEL, base_url=base_url, api_key=api_key, timeout=SECONDS)
    agent = create_react_agent(model, [add], prompt=SYSTEM)
    found = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    return str(found["messages"][-1].content)


def langgraph_anthropic(base_url: str, api_key: str) -> str:
    return langgraph_agent(base_url, api_key, anthropic=True)


async def pydantic_ai_agent(base_url: str, api_key: str, kind: str = "chat") -> str:
    from pydantic_ai import Agent

    if kind == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        model = AnthropicModel(
            MODEL, provider=AnthropicProvider(base_url=base_url, api_key=api_key)
        )
    else:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        made = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
        model = made(MODEL, provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = Agent(model, instructions=SYSTEM, tools=[add])
    return (await agent.run(QUESTION)).output


async def pydantic_ai_responses(base_url: str, api_key: str) -> str:
    return await pydantic_ai_agent(base_url, api_key, "responses")


async def pydantic_ai_anthropic(base_url: str, api_key: str) -> str:
    return await pydantic_ai_agent(base_url, api_key, "anthropic")


async def openai_agents(base_url: str, api_key: str, chat: bool = False) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=SECONDS)
    kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    agent = agents.Agent(
        name="adder",
        instructions=SYSTEM,
        model=kind(MODEL, client),
        tools=[agents.function_tool(add)],
    )
    return str((await agents.Runner.run(agent, QUESTION)).final_output)


async def openai_agents_chat(base_url: str, api_key: str) -> str:
    return await openai_agents(base_url, api_key, chat=True)


def smolagents_code(base_url: str, api_key: str) -> str:
    import smolagents

    model = smolagents.OpenAIModel(model_id=MODEL, api_base=base_url, api_key=api_key)
    agent = smolagents.CodeAgent(
        tools=[smolagents.tool(add)], model=model, verbosity_level=0, max_steps=50
    )
    agent.prompt_templates["system_prompt"] = SYSTEM  # its own has ten thousand characters
    return str(agent.run(QUESTION))


def smolagents_tools(base_url: str, api_key: str) -> str:
    """With tool_choice as it has to be: its own is `required`."""
    import smolagents

    model = smolagents.OpenAIModel(
        model_id=MODEL, api_base=base_url, api_key=api_key, tool_choice="auto"
    )
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(add)], model=model, verbosity_level=0, max_steps=50
    )
    agent.prompt_templates["system_prompt"] = SYSTEM
    return str(agent.run(QUESTION))


def mini_swe_agent(base_url: str, api_key: str) -> str:
    """A turn that calls nothing ends it: it would ask again as if there had been no such turn."""
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    given = {"api_base": base_url, "api_key": api_key, "timeout": SECONDS}
    model = LitellmModel(model_name=f"openai/{MODEL}", model_kwargs=given)
    agent = DefaultAgent(
        model,
        LocalEnvironment(),
        system_template=SYSTEM,
        instance_template="{{task}}",
        max_consecutive_format_errors=1,
    )
    return str(agent.run(QUESTION))


CLIENTS = {
    one.__name__: one
    for one in (
        *(openai_chat, openai_stream, openai_responses, anthropic_messages, anthropic_stream),
        *(litellm_chat, litellm_anthropic, langgraph_agent, langgraph_anthropic),
        *(pydantic_ai_agent, pydantic_ai_responses, pydantic_ai_anthropic),
        *(openai_agents, openai_agents_chat, smolagents_code, smolagents_tools, mini_swe_agent),
    )
}


def play(base_url: str, api_key: str, client: str):
    """An episode of a client; its reward is the share of digits in the answer."""
    try:
        answer = CLIENTS[client](base_url, api_key)
    except Exception as error:
        return at_limit(error)
    if inspect.isawaitable(answer):
        return awaited(answer)
    return digits(answer)


async def awaited(answer) -> float:
    try:
        return digits(await answer)
    except Exception as error:
        return at_limit(error)


def digits(answer: str) -> float:
    return sum(map(str.isdigit, answer)) / max(len(answer), 1)


def at_limit(error: Exception) -> float:
    """The reward of an episode that a limit ended; raises what else there is."""
    if "the episode is over" not in str(error):
        raise error
    return 0.0


def rows():
    return [{"question": QUESTION, "client": name} for name in CLIENTS]
