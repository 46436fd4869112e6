"""Agents that ask for JSON and for calls by client libraries, as their users do.

Runs under an interpreter that has the libraries (tests/examples/test_clients.py).
"""
# mypy: ignore-errors

from __future__ import annotations

import inspect
import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
from pydantic import BaseModel

MODEL, QUESTION, SECONDS = "policy", "Is it so?", 600.0


class Answer(BaseModel):
    """What is to be said."""

    ok: bool
    size: Literal["a", "bc"]


class NotWhole(Exception):
    """A limit of tokens cut the turn."""


FUNCTION = {"name": "tell", "description": "Say it.", "parameters": Answer.model_json_schema()}
TOOL = {"type": "function", "function": FUNCTION}
OWN_TOOL = {"name": "tell", "description": "Say it.", "input_schema": Answer.model_json_schema()}
CHAT = [{"role": "user", "content": QUESTION}]


def openai_of(base_url, api_key):
    import openai

    return openai.OpenAI(base_url=base_url, api_key=api_key, timeout=SECONDS)


def openai_parse(base_url, api_key):
    import openai

    client = openai_of(base_url, api_key)
    try:
        done = client.chat.completions.parse(model=MODEL, messages=CHAT, response_format=Answer)
    except openai.LengthFinishReasonError as error:
        raise NotWhole from error
    return done.choices[0].message.parsed


def openai_stream_parse(base_url, api_key):
    import openai

    client = openai_of(base_url, api_key)
    asked = {"model": MODEL, "messages": CHAT, "response_format": Answer}
    try:
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion().choices[0].message.parsed
    except openai.LengthFinishReasonError as error:
        raise NotWhole from error


def openai_json_object(base_url, api_key):
    """Any object, whose text is the answer; a limit is likely."""
    client = openai_of(base_url, api_key)
    asked = {"type": "json_object"}
    done = client.chat.completions.create(model=MODEL, messages=CHAT, response_format=asked)
    choice = done.choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "length":
        raise NotWhole
    import json

    assert isinstance(json.loads(choice.message.content), dict)
    raise NotWhole  # it is no Answer


def openai_required(base_url, api_key, choice="required"):
    client = openai_of(base_url, api_key)
    asked = {"model": MODEL, "messages": CHAT, "tools": [TOOL], "tool_choice": choice}
    done = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    if done.finish_reason == "length":
        assert not done.message.tool_calls
        raise NotWhole
    (call,) = done.message.tool_calls
    assert call.function.name == "tell" and done.finish_reason == "tool_calls"
    return Answer.model_validate_json(call.function.arguments)


def openai_named(base_url, api_key):
    return openai_required(base_url, api_key, {"type": "function", "function": {"name": "tell"}})


def openai_responses_parse(base_url, api_key):
    from pydantic import ValidationError

    client = openai_of(base_url, api_key)
    try:
        done = client.responses.parse(model=MODEL, input=QUESTION, text_format=Answer)
    except ValidationError as error:  # the client reads an incomplete one too
        raise NotWhole from error
    if done.status == "incomplete":
        raise NotWhole
    return done.output_parsed


def openai_responses_required(base_url, api_key):
    client = openai_of(base_url, api_key)
    tool = {"type": "function", **FUNCTION, "strict": False}
    asked = {"model": MODEL, "input": QUESTION, "tools": [tool], "tool_choice": "required"}
    done = client.responses.create(**asked, parallel_tool_calls=False)
    if done.status == "incomplete":
        raise NotWhole
    (call,) = [one for one in done.output if one.type == "function_call"]
    return Answer.model_validate_json(call.arguments)


def anthropic_any(base_url, api_key, choice=None):
    import anthropic

    client = anthropic.Anthropic(base_url=base_url, api_key=api_key, timeout=SECONDS)
    asked = {"model": MODEL, "max_tokens": 64, "messages": CHAT, "tools": [OWN_TOOL]}
    number = client.messages.count_tokens(model=MODEL, messages=CHAT, tools=[OWN_TOOL])
    choice = choice or {"type": "any", "disable_parallel_tool_use": True}
    said = client.messages.create(**asked, tool_choice=choice)
    assert said.usage.input_tokens == number.input_tokens
    if said.stop_reason == "max_tokens":
        raise NotWhole
    (call,) = said.content
    assert said.stop_reason == "tool_use"
    return Answer.model_validate(call.input)


def anthropic_tool(base_url, api_key):
    return anthropic_any(base_url, api_key, {"type": "tool", "name": "tell"})


async def pydantic_ai_native(base_url, api_key, kind="native"):
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.exceptions import UnexpectedModelBehavior
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(
        MODEL,
        provider=OpenAIProvider(base_url=base_url, api_key=api_key),
        profile=OpenAIModelProfile(supports_json_schema_output=True),
    )
    wanted = NativeOutput(Answer) if kind == "native" else ToolOutput(Answer, name="tell")
    agent = Agent(model, output_type=wanted, retries=0)
    try:
        return (await agent.run(QUESTION)).output
    except UnexpectedModelBehavior as error:
        raise NotWhole from error


async def pydantic_ai_tool(base_url, api_key):
    return await pydantic_ai_native(base_url, api_key, "tool")


CLIENTS = {
    one.__name__: one
    for one in (
        *(openai_parse, openai_stream_parse, openai_json_object, openai_required, openai_named),
        *(openai_responses_parse, openai_responses_required, anthropic_any, anthropic_tool),
        *(pydantic_ai_native, pydantic_ai_tool),
    )
}


async def play(base_url, api_key, client):
    """1 for an answer that validates, and another half if it is ok; less where a limit cut it."""
    try:
        answer = CLIENTS[client](base_url, api_key)
        if inspect.isawaitable(answer):
            answer = await answer
    except NotWhole:
        return -1.0
    assert isinstance(answer, Answer), answer
    return 1.0 + answer.ok / 2


def rows():
    return [{"question": QUESTION, "client": name} for name in CLIENTS]
