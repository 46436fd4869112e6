"""The protocols of agents over raw HTTP: what is given, what is taken back, and who is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import pytest

from engines.environments.agent_api import Server
from engines.environments.agents import AgentAdapter
from tests.engines.environments.playing import call, new_messages, turn_of

THOUGHT = "<think>\nfirst\nthen\n</think>\n\nIt is\nfive."
ADD = {"name": "add", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": ADD}
FLAT_TOOL = {"type": "function", **ADD}
OWN_TOOL = {"name": "add", "input_schema": {"type": "object"}}
CALLING = 'I add.\n<tool_call>{"name": "add"}</tool_call>\n<tool_call>{"name": "add"}</tool_call>'
CALLS = [call("add", of=[2, 3]), call("add", of=[1])]
USER = [{"role": "user", "content": "2 + 3?"}]

CHAT, RESPONSES, MESSAGES = "/chat/completions", "/responses", "/messages"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    RESPONSES: {"input": "2 + 3?"},
    MESSAGES: {"messages": USER, "max_tokens": 100},
}
TOOLS = {CHAT: CHAT_TOOL, RESPONSES: FLAT_TOOL, MESSAGES: OWN_TOOL}
every_protocol = pytest.mark.parametrize("route", ASKED)

server = Server()


class Asking:
    """A client by raw HTTP."""

    def __init__(self, key: str) -> None:
        self.key = key

    def send(self, route: str, body: Mapping[str, Any], **headers: str) -> httpx.Response:
        shown = {"x-api-key": self.key} if route == MESSAGES else {}
        shown = shown or {"Authorization": f"Bearer {self.key}"}
        url = f"{server.url}{route}"
        return httpx.post(url, json=body, headers={**shown, **headers}, timeout=30)

    def ask(self, route: str, **body: Any) -> dict[str, Any]:
        answer = self.send(route, {**ASKED[route], **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, route: str, **body: Any) -> list[tuple[str, Any]]:
        """The events of an answer, by name and data."""
        answer = self.send(route, {**ASKED[route], **body, "stream": True})
        assert answer.headers["Content-Type"] == "text/event-stream", answer.text
        events = []
        for block in answer.text.strip().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines())
            data = fields["data"]
            events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return events


Agent = Callable[[Asking], Any]
Turn = str | tuple[str, Sequence[Any]] | dict[str, Any]


def play(agent: Agent, *turns: Turn) -> tuple[Any, list[dict[str, Any]]]:
    """What an agent returns after such turns of the model, and its requests.

    A turn is a text, a text with its calls, or a text with the tokens that it is.
    """
    adapter = AgentAdapter(server, lambda base_url, api_key: agent(Asking(api_key)), {})
    given = adapter.reset({}, 7)
    seen = []
    try:
        for turn in turns:
            (request,) = json.loads(given.observation)["requests"]
            seen.append(request)
            more = turn if isinstance(turn, dict) else {"text": turn}
            if isinstance(turn, tuple):
                more = {"text": turn[0], "calls": turn[1]}
            given = adapter.take([turn_of(request["name"], **more)])
        assert given.done, "the agent asks for another turn"
        return given.reward, seen
    finally:
        adapter.close()


def returned(agent: Agent, *turns: Turn) -> Any:
    """What the agent came to, by a list that it returns in the place of a reward."""
    out: list[Any] = []

    def keeps(asking: Asking) -> float:
        out.append(agent(asking))
        return 1.0

    play(keeps, *turns)
    return out[0]


def numbered(ids: Sequence[str]) -> list[int]:
    """The numbers of one turn's calls, by their ids."""
    turns, numbers = zip(*(id.rsplit("_", 1) for id in ids), strict=True)
    assert len({*turns}) == 1 and turns[0].startswith("call_")
    return [int(number) for number in numbers]


# --- what is given


def test_a_chat_has_thought_calls_and_usage_apart() -> None:
    tokens = {"prompt_ids": [1, 2], "ids": [3, 4, 5], "logprobs": [-1.0, -2.0, -3.0]}
    got = returned(lambda a: a.ask(CHAT, logprobs=True), {"text": THOUGHT, **tokens})
    (choice,) = got["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "It is\nfive.",
        "reasoning_content": "first\nthen",
    }
    assert choice["finish_reason"] == "stop"
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-1.0, -2.0, -3.0]
    assert got["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    got = returned(lambda a: a.ask(CHAT, tools=[CHAT_TOOL]), (CALLING, CALLS))
    (choice,) = got["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I add."
    assert numbered([one["id"] for one in choice["message"]["tool_calls"]]) == [0, 1]


def test_a_response_has_an_item_for_each_part() -> None:
    got = returned(lambda a: a.ask(RESPONSES), {"text": THOUGHT, "ids": [3], "logprobs": [0.0]})
    reasoning, message = got["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "first\nthen"}]
    assert message["content"] == [
        {"type": "output_text", "text": "It is\nfive.", "annotations": []}
    ]
    assert (got["status"], got["usage"]["output_tokens"]) == ("completed", 1)
    got = returned(lambda a: a.ask(RESPONSES, tools=[FLAT_TOOL]), (CALLING, CALLS))
    kinds = [(one["type"], one.get("arguments")) for one in got["output"]]
    assert kinds == [
        ("message", None),
        ("function_call", '{"of": [2, 3]}'),
        ("function_call", '{"of": [1]}'),
    ]
    assert numbered([one["call_id"] for one in got["output"][1:]]) == [0, 1]


def test_a_message_has_a_block_for_each_part() -> None:
    got = returned(lambda a: a.ask(MESSAGES), {"text": THOUGHT, "ids": [3], "logprobs": [0.0]})
    thinking, text = got["content"]
    assert (thinking["thinking"], text) == ("first\nthen", {"type": "text", "text": "It is\nfive."})
    assert thinking["signature"], "clients do not give back a thought without one"
    assert (got["stop_reason"], got["usage"]["output_tokens"]) == ("end_turn", 1)
    got = returned(lambda a: a.ask(MESSAGES, tools=[OWN_TOOL]), (CALLING, CALLS))
    assert got["stop_reason"] == "tool_use"
    assert numbered([one.pop("id") for one in got["content"][1:]]) == [0, 1]
    assert got["content"][1:] == [
        {"type": "tool_use", "name": "add", "input": {"of": [2, 3]}},
        {"type": "tool_use", "name": "add", "input": {"of": [1]}},
    ]


@every_protocol
def test_a_turn_that_was_cut_says_so(route: str) -> None:
    tokens = {"text": "It i", "ids": [3, 4], "logprobs": [0.0, 0.0], "cut": True}
    got = returned(lambda a: a.ask(route), tokens)
    where = {
        CHAT: lambda: got["choices"][0]["finish_reason"] == "length",
        RESPONSES: lambda: got["incomplete_details"] == {"reason": "max_output_tokens"},
        MESSAGES: lambda: got["stop_reason"] == "max_tokens",
    }
    assert where[route]()


def test_a_text_ends_before_a_stop_text() -> None:
    text = "one END two STOP three"
    chat = returned(lambda a: a.ask(CHAT, stop=["STOP", "END"]), text)
    assert chat["choices"][0]["message"]["content"] == "one "
    assert chat["choices"][0]["finish_reason"] == "stop"
    message = returned(lambda a: a.ask(MESSAGES, stop_sequences=["STOP"]), text)
    assert message["content"] == [{"type": "text", "text": "one END two "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")


# --- streams


def test_chunks_of_a_chat_add_up() -> None:
    tokens = {"text": THOUGHT, "prompt_ids": [1], "ids": [2, 3], "logprobs": [0.0, -1.0]}
    more = {"stream_options": {"include_usage": True}, "logprobs": True}
    events = returned(lambda a: a.stream(CHAT, **more), tokens)
    assert events[-1] == ("", "[DONE]")
    *chunks, usage = [data for _, data in events[:-1]]
    deltas = [one["choices"][0]["delta"] for one in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(one.get("reasoning_content", "") for one in deltas) == "first\nthen"
    assert [one["content"] for one in deltas if one.get("content")] == ["It is\n", "five."]
    ends = [one["choices"][0]["finish_reason"] for one in chunks]
    assert ends == [None] * (len(ends) - 1) + ["stop"]
    assert len(chunks[-1]["choices"][0]["logprobs"]["content"]) == 2
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 3)
    assert len({one["id"] for one in [*chunks, usage]}) == 1
    events = returned(lambda a: a.stream(CHAT, tools=[CHAT_TOOL]), (CALLING, CALLS))
    parts = [
        p for _, data in events[:-1] for p in data["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert [(one["index"], one["function"]["arguments"]) for one in parts] == [
        *((0, ""), (0, '{"of": [2, 3]}'), (1, ""), (1, '{"of": [1]}'))
    ]
    assert numbered([one["id"] for one in parts if "id" in one]) == [0, 1]


def test_events_of_a_response_add_up() -> None:
    events = returned(lambda a: a.stream(RESPONSES), {"text": THOUGHT})
    assert [data["type"] for _, data in events] == [name for name, _ in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [name.removeprefix("response.") for name, _ in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    text = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    assert "".join(text) == events[-1][1]["response"]["output"][1]["content"][0]["text"]
    events = returned(lambda a: a.stream(RESPONSES, tools=[FLAT_TOOL]), ("<tool_call>", CALLS[:1]))
    named = [data for name, data in events if name.startswith("response.function_call_arguments")]
    assert named[0]["delta"] == named[1]["arguments"] == '{"of": [2, 3]}'
    assert numbered([events[-1][1]["response"]["output"][0]["call_id"]]) == [0]


def test_events_of_a_message_add_up() -> None:
    events = returned(lambda a: a.stream(MESSAGES, tools=[OWN_TOOL]), (CALLING, CALLS[:1]))
    assert [name for name, _ in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        *("message_delta", "message_stop"),
    ]
    assert events[0][1]["message"]["content"] == []
    assert events[2][1]["delta"] == {"type": "text_delta", "text": "I add."}
    assert events[4][1]["content_block"]["input"] == {}
    assert json.loads(events[5][1]["delta"]["partial_json"]) == {"of": [2, 3]}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    events = returned(lambda a: a.stream(MESSAGES), THOUGHT)
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert [one["thinking"] for one in deltas[:2]] == ["first\n", "then"]
    assert deltas[2]["type"] == "signature_delta"
    assert [one["text"] for one in deltas[3:]] == ["It is\n", "five."]


# --- what is taken back


def goes_on(asking: Asking, route: str) -> float:
    """Two calls in a turn, thoughts, their results, and a last answer, all given back in full."""
    tools = [TOOLS[route]]
    if route == CHAT:
        chat: list[Any] = [{"role": "developer", "content": "Count."}, *USER]
        said = asking.ask(route, messages=chat, tools=tools)["choices"][0]["message"]
        chat.append(said)
        for one in said["tool_calls"]:
            chat.append({"role": "tool", "tool_call_id": one["id"], "content": "5"})
        return len(asking.ask(route, messages=chat, tools=tools)["choices"])
    if route == RESPONSES:
        items: list[Any] = [*USER]
        more = {"instructions": "Count.", "tools": tools}
        output = asking.ask(route, input=items, **more)["output"]
        items += output
        for one in output:
            if one["type"] == "function_call":
                result = {"type": "function_call_output", "call_id": one["call_id"], "output": "5"}
                items.append(result)
        return len(asking.ask(route, input=items, **more)["output"])
    chat = [*USER]
    more = {"system": [{"type": "text", "text": "Count."}], "tools": tools}
    blocks = asking.ask(route, messages=chat, **more)["content"]
    results: list[Any] = [
        {
            "type": "tool_result",
            "tool_use_id": one["id"],
            "content": [{"type": "text", "text": "5"}],
        }
        for one in blocks
        if one["type"] == "tool_use"
    ]
    chat += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    return len(asking.ask(route, messages=chat, **more)["content"])


@every_protocol
def test_all_protocols_are_the_same_messages(route: str) -> None:
    calling = f"<think>two</think>{CALLING}"
    reward, seen = play(lambda asking: goes_on(asking, route), (calling, CALLS), "5")
    assert reward == 1.0
    first, second = seen
    assert first["messages"] == [{"role": "system", "content": "Count."}, *USER]
    assert first["tools"][0]["function"] == ADD
    new = new_messages(second)
    assert numbered([one.pop("tool_call_id") for one in new]) == [0, 1]
    assert new == [{"role": "tool", "content": "5"}] * 2


def test_a_response_goes_on_from_the_one_before() -> None:
    def agent(asking: Asking) -> float:
        more = {"instructions": "Count."}
        first = asking.ask(RESPONSES, **more)
        second = asking.ask(RESPONSES, input="and?", previous_response_id=first["id"], **more)
        assert second["previous_response_id"] == first["id"]
        asking.ask(RESPONSES, input="so?", previous_response_id=second["id"], **more)
        return 1.0

    _, seen = play(agent, THOUGHT, "6", "7")
    assert [new_messages(one) for one in seen[1:]] == [
        [{"role": "user", "content": "and?"}],
        [{"role": "user", "content": "so?"}],
    ]


def test_a_request_may_go_on_from_an_earlier_response() -> None:
    def agent(asking: Asking) -> float:
        first = asking.ask(RESPONSES)
        for text in ("and?", "or?"):
            asking.ask(RESPONSES, input=text, previous_response_id=first["id"])
        return 1.0

    _, (first, second, third) = play(agent, "5", "6", "7")
    assert second["after"] == third["after"] == first["name"]
    assert new_messages(third) == [{"role": "user", "content": "or?"}]


@pytest.mark.parametrize("back", ["whole", "with_thought", "blank", "told", "added"])
def test_what_clients_make_of_a_turn_is_still_it(back: str) -> None:
    """Thoughts may be left out, calls told in words; what is added is read after the turn."""
    texts = {
        "whole": "It is\nfive.",
        "with_thought": THOUGHT,
        "blank": [{"type": "text", "text": " It is\nfive. "}],
        "told": "Calling tools: [{'id': '%s', 'name': 'add'}]",
        "added": "It is\nfive.\nRan it.",
    }

    def agent(asking: Asking) -> float:
        more = {"tools": [CHAT_TOOL]} if back == "told" else {}
        got = asking.ask(CHAT, **more)["choices"][0]["message"]
        text = texts[back] % got["tool_calls"][0]["id"] if back == "told" else texts[back]
        said = {"role": "assistant", "content": text}
        chat = [*USER, said, {"role": "user", "content": "so?"}]
        asking.ask(CHAT, messages=chat, **more)
        return 1.0

    turn: Turn = ("<tool_call>", CALLS[:1]) if back == "told" else THOUGHT
    _, seen = play(agent, turn, "6")
    told = "Ran it.\n\nso?" if back == "added" else "so?"
    assert seen[1]["after"] == seen[0]["name"]
    assert new_messages(seen[1]) == [{"role": "user", "content": told}]
    assert seen[1]["messages"][1] == {
        "role": "assistant",
        "content": turn[0] if back == "told" else turn,
    }


@pytest.mark.parametrize("said", ["It is six.", "", "five."])
def test_another_turn_than_the_models_is_another_conversation(said: str) -> None:
    def agent(asking: Asking) -> float:
        asking.ask(CHAT)
        chat = [*USER, {"role": "assistant", "content": said}, {"role": "user", "content": "so?"}]
        asking.ask(CHAT, messages=chat)
        return 1.0

    _, (_, second) = play(agent, THOUGHT, "6")
    assert second["after"] == ""
    assert [one["content"] for one in second["messages"]] == ["2 + 3?", said, "so?"]


def test_an_empty_turn_may_be_left_out() -> None:
    def agent(asking: Asking) -> float:
        asking.ask(CHAT)
        asking.ask(CHAT, messages=[*USER, {"role": "user", "content": "so?"}])
        return 1.0

    _, seen = play(agent, "<think>hm</think>\n", "6")
    assert new_messages(seen[1]) == [{"role": "user", "content": "so?"}]


def test_the_tools_stay() -> None:
    def agent(asking: Asking) -> float:
        chat = [*USER]
        said = asking.ask(CHAT, tools=[CHAT_TOOL], tool_choice="none")["choices"][0]["message"]
        assert "tool_calls" not in said and said["content"].startswith("I add.\n<tool_call>")
        chat += [said, {"role": "user", "content": "so?"}]
        said = asking.ask(CHAT, messages=chat)["choices"][0]["message"]
        chat += [said, {"role": "user", "content": "and?"}]
        other = {"type": "function", "function": {"name": "multiply"}}
        asking.ask(CHAT, messages=chat, tools=[other])
        return 1.0

    _, (first, second, third) = play(agent, (CALLING, CALLS), "6", "7")
    assert second["after"] == first["name"] and second["tools"] == [CHAT_TOOL]
    assert third["after"] == "" and third["tools"][0]["function"]["name"] == "multiply"


# --- who is refused

REFUSED = [
    (CHAT, {"n": 0}, "n has to be a number from 1"),
    (CHAT, {"n": 1000}, "n has to be a number from 1 to 128"),
    (CHAT, {"metadata": {"branch": 3}}, "metadata.branch has to be a text"),
    (CHAT, {"tool_choice": "required"}, "tool_choice has to be auto or none"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format has to be text"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs has to be 0"),
    (CHAT, {"functions": [ADD]}, "functions is not there"),
    (CHAT, {"tools": [{"type": "custom"}]}, "a tool has to be a function"),
    (CHAT, {"tools": "add"}, "tools has to be a list of objects"),
    (CHAT, {"stop": 3}, "stop has to be a text"),
    (CHAT, {"stream_options": [1]}, "stream_options has to be an object"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    (CHAT, {"messages": [{"role": "user", "content": [3]}]}, "a part of the type int"),
    (CHAT, {"messages": []}, "messages has to be a list of messages with a role"),
    (RESPONSES, {"input": []}, "input has to be"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    (RESPONSES, {"input": [{"content": "x"}]}, "a message has to have a role"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "web_search is not there"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format has to be text"),
    (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
    (RESPONSES, {"conversation": "c"}, "conversation is not there"),
    (RESPONSES, {"include": 5}, "include has to be a list"),
    (RESPONSES, {"previous_response_id": "resp_x"}, "is no response of this episode"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type image"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_format"),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "user and assistant"),
]


@pytest.mark.parametrize(("route", "body", "said"), REFUSED)
def test_what_cannot_be_answered_is_refused(route: str, body: dict[str, Any], said: str) -> None:
    """And the episode goes on."""

    def agent(asking: Asking) -> float:
        got = asking.send(route, {**ASKED[route], **body})
        assert (got.status_code, got.headers["x-should-retry"]) == (400, "false"), got.text
        error = got.json()["error"]
        assert said in error["message"]
        assert error["type"] == "invalid_request_error"
        assert got.json().get("type") == ("error" if route == MESSAGES else None)
        asking.ask(route)
        return 1.0

    assert play(agent, "5")[0] == 1.0


@every_protocol
def test_a_limit_is_told_in_the_clients_own_form(route: str) -> None:
    def meets(asking: Asking) -> float:
        error = asking.send(route, ASKED[route])
        assert (error.status_code, error.headers["x-should-retry"]) == (400, "false")
        body = error.json()["error"]
        if route == MESSAGES:
            assert body["message"].startswith("prompt is too long: the episode is over")
        else:
            assert body["code"] == "context_length_exceeded"
        return 0.25

    adapter = AgentAdapter(server, lambda base_url, api_key: meets(Asking(api_key)), {})
    adapter.reset({}, 7)
    assert adapter.finish().reward == 0.25
    adapter.close()


def test_models() -> None:
    listed = httpx.get(f"{server.url}/models").json()
    one = httpx.get(f"{server.url}/models/policy").json()
    assert listed["data"] == [one]
    assert (one["id"], one["object"], one["type"]) == ("policy", "model", "model")
    assert httpx.get(f"{server.url}/models/other").status_code == 404

    def agent(asking: Asking) -> float:
        # Anthropic's clients put a /v1 of their own after the address, and a query.
        got = asking.send("/v1/messages?beta=true", ASKED[MESSAGES])
        return float(got.status_code == 200)

    assert play(agent, "5")[0] == 1.0


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("/tokenize", {}, "prompt has to be a text"),
        ("/tokenize", {"messages": USER, "add_generation_prompt": False}, "has to be true"),
        ("/tokenize", {"messages": USER, "chat_template": "x"}, "chat_template is not there"),
        ("/detokenize", {"tokens": [-1]}, "a list of token ids"),
        ("/messages/count_tokens", {"messages": []}, "messages has to be a list"),
    ],
)
def test_what_the_tokenizer_is_not_asked(route: str, body: dict[str, Any], said: str) -> None:
    def agent(asking: Asking) -> float:
        got = asking.send(route, body)
        assert got.status_code == 400 and said in got.text
        asking.ask(CHAT)
        return 1.0

    assert play(agent, "5")[0] == 1.0


# --- time-outs and retries


@pytest.mark.parametrize("how", ["counted", "keyed", "left"])
@every_protocol
def test_a_request_sent_again_gets_the_same_turn(route: str, how: str) -> None:
    """Each client's way of saying so: a count, a key, or having hung up without an answer."""
    waits = threading.Event()

    def agent(asking: Asking) -> float:
        headers = {"keyed": {"Idempotency-Key": "k"}}.get(how, {})
        first: dict[str, Any] = {}
        if how == "left":
            with pytest.raises(httpx.ReadTimeout):
                shown = {"Authorization": f"Bearer {asking.key}"}
                url = f"{server.url}{route}"
                httpx.post(url, json=ASKED[route], headers=shown, timeout=0.5)
            waits.set()
        else:
            waits.set()
            first = asking.send(route, ASKED[route], **headers).json()
        if how == "counted":
            headers = {"x-stainless-retry-count": "1"}
        again = asking.send(route, ASKED[route], **headers).json()
        assert how == "left" or again == first
        return 0.5

    adapter = AgentAdapter(server, lambda base_url, api_key: agent(Asking(api_key)), {})
    first = json.loads(adapter.reset({}, 7).observation)["requests"][0]
    assert waits.wait(20)
    given = adapter.take([turn_of(first["name"], "5")])
    assert (given.reward, given.done) == (0.5, True), "there was one turn"
    adapter.close()


@pytest.mark.parametrize("counted", [0, 1])
def test_a_client_that_has_its_answer_and_asks_the_same_is_no_retry(counted: int) -> None:
    def agent(asking: Asking) -> float:
        for number in range(counted + 1):
            asking.send(CHAT, ASKED[CHAT], **{"x-stainless-retry-count": str(number)})
        asking.ask(CHAT)
        return 1.0

    _, (first, second) = play(agent, "5", "6")
    assert (first["name"][-2:], second["name"][-2:]) == ("/0", "/1")
    assert first["messages"] == second["messages"]
