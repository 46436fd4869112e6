"""The protocols in which agents ask for the model's turn: how each is read, answered and streamed.

OpenAI's Chat Completions and Responses, Anthropic's Messages, and two that take token ids, in the
forms of vLLM's server. Whatever the protocol, a request becomes the same messages (`TurnRequest`),
and its answer comes from the same turn (`ModelTurn`). Only the standard library is imported.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

MODEL = "policy"  # the model's name, whatever a request calls it
MOST_TURNS = 128  # that one request may ask for
LONGEST_BRANCH = 64  # characters of its name
MOST_ID = 2**31  # token ids are below it

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
COUNT = f"{MESSAGES}/count_tokens"

Body: TypeAlias = "Mapping[str, Any]"
Message: TypeAlias = (
    "dict[str, Any]"  # role, content, and of calls their ids, as in Chat Completions
)
Event: TypeAlias = "tuple[str, dict[str, Any] | str]"  # of a stream: its name, or "", and its data

# A text beside calls of tools ends where the first one begins (engines/episodes/tool_calls.py).
_CALLS = re.compile(r"\s*(?:<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What an agent asks, whatever its protocol."""

    messages: list[Message] = field(default_factory=list)  # the conversation, or what is new in it
    ids: list[int] | None = None  # token ids of the conversation, in the place of messages
    tools: list[dict[str, Any]] = field(default_factory=list)  # as in Chat Completions
    gives_calls: bool = True  # whether calls are given as calls, not as text
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template
    stop: tuple[str, ...] = ()  # texts before which the answer ends
    previous: str = ""  # id of the response after which the messages come
    instructions: list[Message] = field(default_factory=list)  # before all messages
    n: int = 1  # turns that answer it


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRequest:
    """What an agent asks the tokenizer: the ids of a request or of a text, or the text of ids."""

    turn: TurnRequest | None = None  # a request for a turn, which is not made
    text: str | None = None
    special: bool = True  # whether the special tokens are added with which texts begin
    ids: list[int] | None = None
    texts: bool = False  # whether the text of each token is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a tool that the model wrote."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def json(self) -> str:
        """Its arguments as JSON."""
        return json.dumps(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """A turn of the model, as an agent is given it."""

    id: str  # hexadecimal, of this turn alone
    text: str  # all that the model wrote
    thought: str = ""
    content: str = ""  # without thought and calls, up to a stop text
    calls: tuple[Call, ...] = ()
    stop: str | None = None  # the stop text before which the content ends
    cut: bool = False  # whether it reached a limit of tokens
    prompt_ids: Sequence[int] = ()  # token ids of the whole conversation before it
    ids: Sequence[int] = ()  # of the turn
    logprobs: Sequence[float] = ()  # of each, as it was sampled
    others: tuple[ModelTurn, ...] = ()  # further turns from the same place, where n were asked for

    @classmethod
    def of(
        cls,
        text: str,
        calls: Sequence[Mapping[str, Any]] | None,
        stops: Sequence[str],
        id: str,
        **more: Any,
    ) -> ModelTurn:
        """The turn that a text is."""
        thought, content = thought_and_answer(text)
        stop = None
        if calls:
            found = _CALLS.search(content)
            content = content[: found.start()] if found else ""
        elif reached := [(place, one) for one in stops if (place := content.find(one)) >= 0]:
            place, stop = min(reached)
            content = content[:place]
        made = tuple(
            Call(id=f"call_{id[:8]}_{place}", name=one["name"], arguments=one["arguments"])
            for place, one in enumerate(calls or ())
        )
        return cls(
            id=id, text=text, thought=thought, content=content, calls=made, stop=stop, **more
        )

    @property
    def message(self) -> Message:
        """The turn as a message of Chat Completions."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [_call(one.id, one.name, one.json) for one in self.calls]
        return message

    @property
    def all_ids(self) -> dict[str, list[int]]:
        """The token ids read and written, as vLLM names them."""
        return {"prompt_token_ids": list(self.prompt_ids), "token_ids": list(self.ids)}

    @property
    def usage(self) -> dict[str, Any]:
        """How many tokens were read and written, as OpenAI names them."""
        read, wrote = len(self.prompt_ids), sum(len(one.ids) for one in (self, *self.others))
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}

    @property
    def token_logprobs(self) -> list[dict[str, Any]]:
        """Of each token, by its number: no tokenizer is here that knows its text."""
        return [
            {
                "token": f"token_id:{id}",
                "token_id": id,
                "logprob": logprob,
                "top_logprobs": [],
            }
            for id, logprob in zip(self.ids, self.logprobs, strict=True)
        ]


def thought_and_answer(text: str) -> tuple[str, str]:
    """What stands before the first `</think>`, and the rest; all of an open thought is one."""
    thought, closed, answer = text.partition("</think>")
    begun = thought.lstrip()
    if not closed and not begun.startswith("<think>"):
        return "", text
    return begun.removeprefix("<think>").strip("\n"), answer.lstrip("\n")


@dataclass(frozen=True, slots=True)
class AgentProtocol:
    """How the requests of one route are read and answered."""

    read: Callable[[Body], TurnRequest]  # ValueError, in a sentence, for what cannot be answered
    answer: Callable[[Body, ModelTurn], dict[str, Any]]
    stream: Callable[[Body, ModelTurn], Iterator[Event]]


@dataclass(frozen=True, slots=True)
class TokenizerProtocol:
    """How the requests of one route are read that the tokenizer answers."""

    read: Callable[[Body], TokenizerRequest]  # ValueError as of AgentProtocol
    answer: Callable[[Mapping[str, Any]], dict[str, Any]]  # of protocol.TokenizerAnswers


# --- what the protocols share


def branch_of(body: Body, header: str | None) -> str:
    """The part of its episode that a request says it is of: `metadata.branch`, or a header."""
    metadata = body.get("metadata")
    named = metadata.get("branch") if isinstance(metadata, dict) else None
    branch = header or "" if named is None else named
    if not isinstance(branch, str) or len(branch) > LONGEST_BRANCH:
        raise ValueError(f"metadata.branch has to be a text of at most {LONGEST_BRANCH} characters")
    return branch


def _refuse(body: Body, *names: str) -> None:
    """ValueError for fields that would change the answer, and are not there."""
    for name in names:
        if body.get(name):
            raise ValueError(
                f"{name} is not there: the policy answers with text and calls of functions. Leave it "
                "out"
            )


def _no_others(body: Body) -> None:
    """ValueError where the log-probs of other tokens are asked for."""
    if body.get("top_logprobs"):
        raise ValueError(
            "top_logprobs has to be 0: the log-probability of the sampled token alone is known"
        )


def _text(content: Any, between: str = "") -> str:
    """A content as text; ValueError where a part of it is none."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(
                f"a message has a part of the type {kind}; the policy reads text alone"
            )
    return between.join(part["text"] for part in parts)


def _list(body: Body, name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} has to be a list")
    return value


def _dicts(value: Any, name: str) -> list[dict[str, Any]]:
    """A list of objects; ValueError for anything else. None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f"{name} has to be a list of objects")
    return value


def _object(body: Body, name: str) -> dict[str, Any]:
    """A field that is an object; ValueError where it is none. None is an empty one."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} has to be an object")
    return value or {}


def _gives_calls(choice: Any) -> bool:
    """Whether calls are given as calls, by tool_choice; ValueError where it is more than that."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto", "none"):
        return kind != "none"
    raise ValueError(
        f"tool_choice has to be auto or none, and is {json.dumps(choice)[:80]}: turns are sampled by "
        "the recipe, so nothing can make the policy call a tool"
    )


def _plain_text(wanted: Any, name: str) -> None:
    kind = wanted.get("type", "text") if isinstance(wanted, dict) else wanted
    if kind not in (None, "text"):
        raise ValueError(
            f"{name} has to be text, and is {str(kind)[:40]}: turns are sampled by the recipe, "
            "without a grammar. Ask for the form in a message, or offer a tool"
        )


def _tool(name: Any, about: Any, parameters: Any) -> dict[str, Any]:
    """A tool as in Chat Completions."""
    if not isinstance(name, str) or not name:
        raise ValueError("a tool has to be a function with a name, which the agent itself runs")
    made = {"name": name, "parameters": parameters or {"type": "object", "properties": {}}}
    return {"type": "function", "function": {**made, **({"description": about} if about else {})}}


def _stops(value: Any, name: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
        raise ValueError(f"{name} has to be a text, or a list of texts")
    return tuple(texts)


def _call(id: Any, name: Any, arguments: str) -> dict[str, Any]:
    """A call that the model has made, as in Chat Completions."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _pieces(text: str) -> list[str]:
    """A text as a stream gives it, line by line."""
    return text.splitlines(keepends=True)


# --- OpenAI Chat Completions


def _read_chat(body: Body) -> TurnRequest:
    messages = body.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages)
    ):
        raise ValueError("messages has to be a list of messages with a role")
    n = body.get("n")
    if n is not None and (type(n) is not int or not 1 <= n <= MOST_TURNS):
        raise ValueError(f"n has to be a number from 1 to {MOST_TURNS}")
    _refuse(body, "functions", "function_call", "audio", "web_search_options")
    _no_others(body)
    _plain_text(body.get("response_format"), "response_format")
    _object(body, "stream_options")
    tools = _dicts(body.get("tools"), "tools")
    for one in tools:
        function = one.get("function")
        _tool(function.get("name") if isinstance(function, dict) else None, "", None)
    return TurnRequest(
        messages=[_chat_message(one) for one in messages],
        tools=tools,
        gives_calls=_gives_calls(body.get("tool_choice")),
        variables=_object(body, "chat_template_kwargs"),
        stop=_stops(body.get("stop"), "stop"),
        n=n or 1,
    )


def _chat_message(given: Message) -> Message:
    role = {"developer": "system"}.get(given["role"], given["role"])
    content = _text(given.get("content"))
    if role == "assistant":
        content = thought_and_answer(content)[1]
    kept = {k: given[k] for k in ("tool_calls", "tool_call_id", "name") if given.get(k)}
    _dicts(kept.get("tool_calls"), "tool_calls")
    return {"role": role, "content": content, **kept}


def _chat_choice(body: Body, turn: ModelTurn, index: int) -> dict[str, Any]:
    """A choice of an answer, without its message."""
    reason = "tool_calls" if turn.calls else "length" if turn.cut else "stop"
    choice: dict[str, Any] = {"index": index, "finish_reason": reason}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": turn.token_logprobs}
    if body.get("return_token_ids"):
        choice["token_ids"] = list(turn.ids)
    return choice


def _answer_chat(body: Body, turn: ModelTurn) -> dict[str, Any]:
    more = {"prompt_token_ids": list(turn.prompt_ids)} if body.get("return_token_ids") else {}
    choices = [
        {**_chat_choice(body, one, index), "message": one.message}
        for index, one in enumerate((turn, *turn.others))
    ]
    return {**_head(turn, "chat.completion"), "choices": choices, **more, "usage": turn.usage}


def _stream_chat(body: Body, turn: ModelTurn) -> Iterator[Event]:
    head = _head(turn, "chat.completion.chunk")

    def chunk(delta: dict[str, Any]) -> Event:
        choice = {"index": index, "delta": delta, "finish_reason": None}
        return "", {**head, "choices": [choice]}

    ids = {"prompt_token_ids": list(turn.prompt_ids)} if body.get("return_token_ids") else {}
    for index, one in enumerate((turn, *turn.others)):
        yield chunk({"role": "assistant", "content": ""})
        for piece in _pieces(one.thought):
            yield chunk({"reasoning_content": piece})
        for piece in _pieces(one.content):
            yield chunk({"content": piece})
        for place, call in enumerate(one.calls):
            yield chunk({"tool_calls": [{"index": place, **_call(call.id, call.name, "")}]})
            part = {"index": place, "function": {"arguments": call.json}}
            yield chunk({"tool_calls": [part]})
        last = {"delta": {}, **_chat_choice(body, one, index)}
        yield "", {**head, "choices": [last], **ids}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", {**head, "choices": [], "usage": turn.usage}
    yield "", "[DONE]"


def _head(turn: ModelTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": 0, "model": MODEL}


# --- OpenAI Responses


def _read_responses(body: Body) -> TurnRequest:
    asked = body.get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not items:
        raise ValueError("input has to be a text, or a list of items")
    _refuse(body, "conversation", "prompt", "background")
    _no_others(body)
    _plain_text(_object(body, "text").get("format"), "text.format")
    tools = []
    for one in _dicts(body.get("tools"), "tools"):
        if one.get("type") != "function":
            raise ValueError(f"tools have to be functions; {one.get('type')} is not there")
        tools.append(_tool(one.get("name"), one.get("description"), one.get("parameters")))
    _list(body, "include")
    told = _text(body.get("instructions"))
    return TurnRequest(
        messages=_response_items(_dicts(items, "input")),
        tools=tools,
        gives_calls=_gives_calls(body.get("tool_choice")),
        variables=_object(body, "chat_template_kwargs"),
        previous=_text(body.get("previous_response_id")),
        instructions=[{"role": "system", "content": told}] if told else [],
    )


def _response_items(items: Sequence[dict[str, Any]]) -> list[Message]:
    """Items as messages; what stands together of the model's is one of them."""
    messages: list[Message] = []

    def of_model() -> Message:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for item in items:
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") == "assistant":
            turn = of_model()
            turn["content"] += thought_and_answer(_text(item.get("content")))[1]
        elif kind == "message":
            messages.append(_chat_message({"content": item.get("content"), "role": _role(item)}))
        elif kind == "function_call":
            one = _call(item.get("call_id"), item.get("name"), item.get("arguments") or "{}")
            of_model().setdefault("tool_calls", []).append(one)
        elif kind == "function_call_output":
            content, id = _text(item.get("output")), item.get("call_id")
            messages.append({"role": "tool", "content": content, "tool_call_id": id})
        elif kind == "reasoning":
            of_model()
        else:
            raise ValueError(f"input has an item of the type {kind}, which is not there")
    return messages


def _role(item: Message) -> str:
    role = item.get("role")
    if not isinstance(role, str):
        raise ValueError("a message has to have a role")
    return role


def _answer_responses(body: Body, turn: ModelTurn) -> dict[str, Any]:
    ids = turn.all_ids if body.get("return_token_ids") else {}
    return {**_response(body, turn), **ids, "output": list(_output(body, turn))}


def _response(body: Body, turn: ModelTurn) -> dict[str, Any]:
    """A response, without what the model wrote."""
    read, wrote = len(turn.prompt_ids), len(turn.ids)
    return {
        "id": f"resp_{turn.id}",
        "object": "response",
        "created_at": 0,
        "status": "incomplete" if turn.cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if turn.cut else None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": MODEL,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": wrote,
            "output_tokens_details": {"reasoning_tokens": 0},  # not counted apart
            "total_tokens": read + wrote,
        },
    }


def _output(body: Body, turn: ModelTurn) -> Iterator[dict[str, Any]]:
    """The items that a turn is."""
    if turn.thought:
        content = [{"type": "reasoning_text", "text": turn.thought}]
        yield {"id": f"rs_{turn.id}", "type": "reasoning", "summary": [], "content": content}
    if turn.content or not turn.calls:
        part: dict[str, Any] = {"type": "output_text", "text": turn.content, "annotations": []}
        if "message.output_text.logprobs" in _list(body, "include"):
            part["logprobs"] = turn.token_logprobs
        yield {
            "id": f"msg_{turn.id}",
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if turn.cut else "completed",
            "content": [part],
        }
    for place, one in enumerate(turn.calls):
        yield {
            "id": f"fc_{turn.id}_{place}",
            "type": "function_call",
            "status": "completed",
            "call_id": one.id,
            "name": one.name,
            "arguments": one.json,
        }


def _stream_responses(body: Body, turn: ModelTurn) -> Iterator[Event]:
    whole = _answer_responses(body, turn)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    number = itertools.count()

    def event(kind: str, **more: Any) -> Event:
        name = f"response.{kind}"
        return name, {"type": name, "sequence_number": next(number), **more}

    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for place, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": place}
        called = item["type"] == "function_call"
        blank: dict[str, Any] = {"arguments": ""} if called else {"content": []}
        added = {**item, **blank, "status": "in_progress"}
        yield event("output_item.added", output_index=place, item=added)
        if called:
            yield event("function_call_arguments.delta", **at, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield event("function_call_arguments.done", **at, **done)
        else:
            (part,) = item["content"]
            at["content_index"] = 0
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield event("content_part.added", **at, part={**part, "text": ""})
            for piece in _pieces(part["text"]):
                yield event(f"{part['type']}.delta", **at, delta=piece, **more)
            yield event(f"{part['type']}.done", **at, text=part["text"], **more)
            yield event("content_part.done", **at, part=part)
        yield event("output_item.done", output_index=place, item=item)
    yield event(whole["status"], response=whole)


# --- Anthropic Messages


def _read_messages(body: Body) -> TurnRequest:
    given = _dicts(body.get("messages"), "messages")
    if not given or not all(one.get("role") in ("user", "assistant", "system") for one in given):
        raise ValueError("messages has to be a list of messages of the roles user and assistant")
    _refuse(body, "mcp_servers", "container")
    wanted = body.get("output_format") or _object(body, "output_config").get("format")
    _plain_text(wanted, "output_format")
    tools = []
    for one in _dicts(body.get("tools"), "tools"):
        if one.get("type") not in (None, "custom"):
            raise ValueError(f"tools have to be the agent's own; {one['type']} is not there")
        tools.append(_tool(one.get("name"), one.get("description"), one.get("input_schema")))
    told = _text(body.get("system"), "\n")
    messages = [{"role": "system", "content": told}] if told else []
    return TurnRequest(
        messages=messages + [part for one in given for part in _block_messages(one)],
        tools=tools,
        gives_calls=_gives_calls(body.get("tool_choice")),
        variables=_object(body, "chat_template_kwargs"),
        stop=_stops(body.get("stop_sequences"), "stop_sequences"),
    )


def _block_messages(message: Message) -> list[Message]:
    """A message of content blocks as messages: results of tools are some of their own."""
    content, role = message.get("content"), message["role"]
    if isinstance(content, str):
        return [_chat_message(message)]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    found: list[Message] = []
    for block in _dicts(content, "content"):
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            calls.append(_call(block.get("id"), block.get("name"), arguments))
        elif kind == "tool_result":
            id, text = block.get("tool_use_id"), _text(block.get("content"), "\n")
            found.append({"role": "tool", "content": text, "tool_call_id": id})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    if texts or not found:
        text = _text(texts, "" if role == "assistant" else "\n")
        found.append(_chat_message({"role": role, "content": text, "tool_calls": calls}))
    return found


def _answer_messages(body: Body, turn: ModelTurn) -> dict[str, Any]:
    reason = "tool_use" if turn.calls else "stop_sequence" if turn.stop else "end_turn"
    ids = turn.all_ids if body.get("return_token_ids") else {}
    return {
        "id": f"msg_{turn.id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": list(_blocks(turn)),
        "stop_reason": "max_tokens" if turn.cut and not turn.calls else reason,
        "stop_sequence": turn.stop,
        **ids,
        "usage": {
            "input_tokens": len(turn.prompt_ids),
            "output_tokens": len(turn.ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _blocks(turn: ModelTurn) -> Iterator[dict[str, Any]]:
    if turn.thought:
        # Clients give a thought back as one only if it is signed.
        yield {"type": "thinking", "thinking": turn.thought, "signature": turn.id}
    if turn.content or not turn.calls:
        yield {"type": "text", "text": turn.content}
    for one in turn.calls:
        yield {"type": "tool_use", "id": one.id, "name": one.name, "input": dict(one.arguments)}


def _stream_messages(body: Body, turn: ModelTurn) -> Iterator[Event]:
    whole = _answer_messages(body, turn)

    def event(name: str, **more: Any) -> Event:
        return name, {"type": name, **more}

    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**whole["usage"], "output_tokens": 0}
    yield event("message_start", message=begun)
    for place, block in enumerate(whole["content"]):
        kind = block["type"]
        if kind == "tool_use":
            blank: dict[str, Any] = {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        else:
            blank = {name: "" for name in (kind, "signature") if name in block}
            deltas = [{"type": f"{kind}_delta", kind: one} for one in _pieces(block[kind])]
            if kind == "thinking":
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
        yield event("content_block_start", index=place, content_block={**block, **blank})
        for delta in deltas:
            yield event("content_block_delta", index=place, delta=delta)
        yield event("content_block_stop", index=place)
    last = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=last, usage={"output_tokens": len(turn.ids)})
    yield event("message_stop")


# --- token ids, in the forms of vLLM's server


def _read_ids(name: str) -> Callable[[Body], TurnRequest]:
    def read(body: Body) -> TurnRequest:
        ids = body.get(name)
        if not isinstance(ids, list) or not ids or not all(map(_is_token, ids)):
            raise ValueError(
                f"{name} has to be a list of token ids; /v1/chat/completions takes text"
            )
        if body.get("n") not in (None, 1):
            raise ValueError("n has to be 1: an episode has one answer a turn")
        if body.get("stream") and name == "token_ids":
            raise ValueError("stream has to be false: a turn is given whole")
        return TurnRequest(ids=ids)

    return read


def _is_token(id: object) -> bool:
    return type(id) is int and 0 <= id < MOST_ID


def _answer_completions(body: Body, turn: ModelTurn) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "length" if turn.cut else "stop",
        "text": turn.text,
        **turn.all_ids,
    }
    if body.get("logprobs") is not None:
        choice["logprobs"] = {
            "tokens": [one["token"] for one in turn.token_logprobs],
            "token_logprobs": list(turn.logprobs),
        }
    head = {**_head(turn, "text_completion"), "id": f"cmpl-{turn.id}"}
    return {**head, "choices": [choice], "usage": turn.usage}


def _stream_completions(body: Body, turn: ModelTurn) -> Iterator[Event]:
    yield "", _answer_completions(body, turn)
    yield "", "[DONE]"


def _answer_generate(body: Body, turn: ModelTurn) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": "length" if turn.cut else "stop",
        "token_ids": list(turn.ids),
        "logprobs": {"content": turn.token_logprobs},
    }
    return {
        "request_id": turn.id,
        "choices": [choice],
        "prompt_token_ids": list(turn.prompt_ids),
        "usage": turn.usage,
    }


PROTOCOLS = {
    CHAT: AgentProtocol(_read_chat, _answer_chat, _stream_chat),
    RESPONSES: AgentProtocol(_read_responses, _answer_responses, _stream_responses),
    MESSAGES: AgentProtocol(_read_messages, _answer_messages, _stream_messages),
    COMPLETIONS: AgentProtocol(_read_ids("prompt"), _answer_completions, _stream_completions),
    GENERATE: AgentProtocol(_read_ids("token_ids"), _answer_generate, _stream_completions),
}


# --- the tokenizer, in the forms of vLLM's server and of Anthropic


def _read_tokenize(body: Body) -> TokenizerRequest:
    texts = bool(body.get("return_token_strs"))
    if "messages" not in body:
        text = body.get("prompt")
        if not isinstance(text, str):
            raise ValueError("prompt has to be a text, or messages a list of messages")
        special = body.get("add_special_tokens") in (None, True)
        return TokenizerRequest(text=text, special=special, texts=texts)
    _refuse(body, "chat_template", "continue_final_message", "add_special_tokens")
    if body.get("add_generation_prompt") not in (None, True):
        raise ValueError(
            "add_generation_prompt has to be true: messages become what a turn is asked for after"
        )
    return TokenizerRequest(turn=_read_chat(body), texts=texts)


def _answer_tokenize(made: Mapping[str, Any]) -> dict[str, Any]:
    ids = made["ids"]
    most, texts = made["max_model_len"], made.get("tokens")
    return {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts}


def _read_detokenize(body: Body) -> TokenizerRequest:
    ids = body.get("tokens")
    if not isinstance(ids, list) or not all(map(_is_token, ids)):
        raise ValueError("tokens has to be a list of token ids")
    return TokenizerRequest(ids=ids)


TOKENIZER = {
    TOKENIZE: TokenizerProtocol(_read_tokenize, _answer_tokenize),
    DETOKENIZE: TokenizerProtocol(_read_detokenize, lambda made: {"prompt": made["text"]}),
    COUNT: TokenizerProtocol(
        lambda body: TokenizerRequest(turn=_read_messages(body)),
        lambda made: {"input_tokens": len(made["ids"])},
    ),
}
