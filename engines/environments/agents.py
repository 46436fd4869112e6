"""Agents: programs that ask the model over the API of OpenAI or Anthropic, as environments.

An agent runs in a thread of this process, and is given the address and a key of a server that only
this machine reaches. Each request of it is a turn: the messages, or token ids, that are new in it are
what the environment says, and what the model writes is the answer to it. So an episode is one
conversation that grows at its end; an agent that asks anything else, such as a second conversation
or one whose past it has rewritten, fails its episode.

Of ours only what needs the standard library alone is imported.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from configs.imports import described
from engines.environments.agent_api import (
    SEND_SECONDS,
    TOO_LONG,
    AgentRequest,
    Answer,
    Refusal,
    Server,
    refused,
)
from engines.environments.agent_protocols import MODEL, Message, ModelTurn
from engines.environments.contract import Given, Loaded, NotAllowed, digest_of
from engines.environments.protocol import EnvironmentReady, EnvironmentStart, Tokens, ToolCall
from engines.processes.user_code import shortened

BLOCKED_SECONDS = 5.0  # in which the event loop of agents takes up another, or is blocked
_STACK = 2**21  # bytes of the stack of a thread, of which each episode has two


def load_agent(start: EnvironmentStart, agent: Callable[..., Any]) -> Loaded:
    """A user's function as an agent; ValueError where it cannot be given the API."""
    names = _parameters(agent)
    if names is not None and "base_url" not in names:
        raise ValueError(
            f"the agent {start.path} takes no argument base_url, so it cannot ask the model. Let it "
            "take base_url and api_key"
        )
    threading.stack_size(_STACK)
    server = Server()
    ready = EnvironmentReady(digest=digest_of([agent]), packages={}, tools=[], chats=True)
    return Loaded(make=lambda: AgentAdapter(server, agent, start.params), ready=ready)


def _parameters(agent: Callable[..., Any]) -> set[str] | None:
    """The names of a function's arguments; None where it takes any."""
    parameters = inspect.signature(agent).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return None
    return set(parameters)


@dataclass(frozen=True, slots=True)
class _End:
    """The agent's function has returned or raised."""

    result: Any
    error: BaseException | None


@dataclass(slots=True)
class _Session:
    """What goes on between an agent, the server's threads and the adapter."""

    events: SimpleQueue[AgentRequest | _End] = field(default_factory=SimpleQueue)
    over: Refusal | None = None  # what every request is answered from now on
    # The conversation up to each response, without instructions, by the response's id.
    responses: dict[str, list[Message]] = field(default_factory=dict)

    def ask(self, request: AgentRequest) -> Answer:
        """Wait for the model's turn."""
        previous = request.turn.previous
        if previous and previous not in self.responses:
            text = f"previous_response_id is {previous[:60]}, which is no response of this episode"
            return refused(text, 400, "previous_response_not_found")
        self.events.put(request)
        return request.answer.get()


class AgentAdapter:
    """One agent that plays one episode."""

    def __init__(
        self, server: Server, agent: Callable[..., Any], params: Mapping[str, Any]
    ) -> None:
        self._server = server
        self._agent = agent
        self._params = params
        self._key = secrets.token_urlsafe(24)
        self._session = _Session()
        self._chat: list[Message] = []  # the conversation, by messages or
        self._ids: list[int] | None = None  # by token ids
        self._tokens: list[int] = []  # all of the conversation before the turn
        self._turn: Tokens = {}  # tokens of the turn that comes
        self._tools: list[dict[str, Any]] = []  # of the first request
        self._last: ModelTurn | None = None
        self._asked: AgentRequest | None = None  # the last one that was answered
        self._waits: AgentRequest | None = None  # for the model's turn
        self._turns = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        """The messages and tools of the agent's first request, or its token ids, as JSON."""
        self._server.sessions[self._key] = self._session
        given = {**row, **self._params, "seed": seed, "model": MODEL}
        given |= {"base_url": self._server.url, "api_key": self._key}
        names = _parameters(self._agent)
        arguments = {k: v for k, v in given.items() if names is None or k in names}
        threading.Thread(target=self._run, args=(arguments,), daemon=True).start()
        event = self._session.events.get()
        if isinstance(event, _End):
            if event.error is not None:
                raise event.error
            raise NotAllowed("the agent ended before it had asked the model anything")
        self._waits, self._ids, self._tools = event, event.turn.ids, event.turn.tools
        if self._ids is not None:
            return Given(observation=json.dumps({"ids": self._ids}))
        self._chat = self._whole(event)
        return _said(self._chat, event, self._tools)

    def see(self, tokens: Tokens) -> None:
        """The tokens of the turn that comes next."""
        self._turn = tokens

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        """What is new in the agent's next request, as JSON; or its reward, at the end."""
        assert self._waits is not None, "the agent waits for each turn"
        turn = self._answer(text, calls)
        event = self._next()
        if isinstance(event, _End):
            self._waits = None
            if event.error is not None:
                raise event.error
            return Given(observation=None, reward=_plain_number(event.result), done=True)
        self._waits = event
        ids = event.turn.ids
        if (self._ids is None) != (ids is None):
            raise NotAllowed(
                f"the agent's request after turn {self._turns} is one of "
                f"{'messages' if ids is None else 'token ids'} and the one before was not. An "
                "episode is one conversation, in messages or in token ids"
            )
        return self._new_ids(ids) if ids is not None else self._new(event, turn)

    def _whole(self, request: AgentRequest) -> list[Message]:
        """The conversation that a request stands for."""
        asked = request.turn
        past = self._session.responses[asked.previous] if asked.previous else []
        return [*asked.instructions, *past, *asked.messages]

    def _new(self, event: AgentRequest, turn: ModelTurn) -> Given:
        """The messages of a request that were not there; `turn`: the model's last one."""
        if event.turn.tools and event.turn.tools != self._tools:
            raise NotAllowed(
                f"the agent's request after turn {self._turns} has other tools than its first one. "
                "They stand at the beginning of the conversation, which only grows at its end"
            )
        chat, before, place = self._whole(event), self._chat, len(self._chat)
        for number, (was, now) in enumerate(zip(before, chat, strict=False)):
            if _compared(was) != _compared(now):
                raise NotAllowed(_not_on(self._turns, number, now))
        added: str | None = ""
        empty = not turn.content.strip() and not turn.calls  # clients leave such a turn out
        if len(chat) > place and not (empty and chat[place]["role"] != "assistant"):
            added = _added(turn, chat[place])
            if added is None:
                raise NotAllowed(_not_on(self._turns, place, chat[place]))
            place += 1
        if len(chat) <= place:
            raise NotAllowed(_not_on(self._turns, len(chat), None))
        self._chat = chat
        new = chat[place:]
        if added:
            new[0] = {**new[0], "content": f"{added}\n\n{new[0]['content']}"}
        return _said(new, event)

    def _new_ids(self, ids: list[int]) -> Given:
        """The token ids of a request that come after all that was read and written before."""
        before = self._tokens
        if ids[: len(before)] != before or len(ids) == len(before):
            pairs = zip(ids, before, strict=False)
            place = next((n for n, (now, was) in enumerate(pairs) if now != was), len(ids))
            shown = f"has {ids[place]}" if place < min(len(ids), len(before)) else "ends"
            raise NotAllowed(
                f"the agent's request after turn {self._turns} {shown} at token {place + 1}, where "
                "it does not go on from the request before and its answer. An episode is one "
                "conversation that grows at its end"
            )
        self._ids = ids
        return Given(observation=json.dumps({"ids": ids[len(before) :]}))

    def finish(self) -> Given:
        """Tell an agent that waits for a turn that there is none; its reward, if it returns one."""
        self._session.over = _AT_LIMIT
        if self._waits is None:
            return Given(observation=None)
        self._waits.answer.put(_AT_LIMIT)
        self._waits = None
        while not isinstance(event := self._session.events.get(), _End):
            event.answer.put(_AT_LIMIT)
        return Given(observation=None, reward=_plain_number(event.result))

    def close(self) -> None:
        self._session.over = _LET_GO
        self._server.sessions.pop(self._key, None)
        if self._waits is not None:
            self._waits.answer.put(_LET_GO)

    def _next(self) -> AgentRequest | _End:
        """What the agent does next; a request that was sent again gets its answer again."""
        while True:
            event = self._session.events.get()
            if isinstance(event, _End) or not self._is_again(event):
                return event
            assert self._last is not None
            self._asked = event
            self._give(event, self._last)

    def _is_again(self, event: AgentRequest) -> bool:
        """Whether a request is the last one, sent again by a client that has no answer to it.

        Its client says so, or sends the same Idempotency-Key, or had closed the connection before
        the answer came.
        """
        last = self._asked
        assert last is not None
        if event.turn.ids != self._ids or (
            event.turn.ids is None and self._whole(event) != self._chat
        ):
            return False
        if event.again or (event.key and event.key == last.key):
            return True
        return not last.taken.result(timeout=2 * SEND_SECONDS)

    def _give(self, request: AgentRequest, turn: ModelTurn) -> None:
        """Answer a request with a turn."""
        if request.turn.ids is None:
            said = [*self._chat[len(request.turn.instructions) :], _given_back(turn)]
            self._session.responses[f"resp_{turn.id}"] = said
        request.answer.put(turn)

    def _run(self, arguments: Mapping[str, Any]) -> None:
        try:
            result = self._agent(**arguments)
            if inspect.isawaitable(result):
                result = _loop.run(result)
            self._session.events.put(_End(result, None))
        except BaseException as error:  # of a user's code: any, sys.exit too
            if not isinstance(error, Exception):
                error = RuntimeError(f"the agent left by {described(error)}")
            self._session.events.put(_End(None, error))

    def _answer(self, text: str, calls: Sequence[ToolCall] | None) -> ModelTurn:
        """Give the model's turn to the agent that waits for it."""
        assert self._waits is not None, "the agent waits for each turn"
        self._turns += 1
        asked = self._waits.turn
        turn = ModelTurn.of(
            text,
            calls if asked.tools and asked.gives_calls else None,
            asked.stop,
            self._turns,
            id=secrets.token_hex(8),
            cut=bool(self._turn.get("cut")),
            prompt_ids=[*self._tokens, *self._turn.get("given", ())],
            ids=self._turn.get("written", ()),
            logprobs=self._turn.get("logprobs", ()),
        )
        self._tokens = [*turn.prompt_ids, *turn.ids]
        self._last, self._asked = turn, self._waits
        self._give(self._waits, turn)
        return turn


def _plain_number(result: Any) -> Any:
    """A reward, of which a boolean is one too."""
    return float(result) if isinstance(result, bool) else result


class _Loop:
    """The event loop of all agents of this process, so that a client which they share stays usable.

    An agent may block it, with a client that is not asynchronous. It waits for its turn then, which
    would never come: other agents would wait for the loop. From the first time on each has its own.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._blocked = False
        self._lock = threading.Lock()

    def run(self, result: Awaitable[Any]) -> Any:
        """What it comes to; raises what it raises. Called in the agent's own thread."""
        if self._blocked:
            return asyncio.run(_awaited(result))
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
                thread.start()
        begun = threading.Lock()  # held by the thread that goes on with it
        ended: SimpleQueue[_End | None] = SimpleQueue()

        async def outcome() -> None:
            if not begun.acquire(blocking=False):
                return
            ended.put(None)
            try:
                ended.put(_End(await result, None))
            except BaseException as error:  # sys.exit would end the loop
                ended.put(_End(None, error))

        asyncio.run_coroutine_threadsafe(outcome(), self._loop)
        try:
            ended.get(timeout=BLOCKED_SECONDS)
        except Empty:
            if begun.acquire(blocking=False):
                self._blocked = True
                return asyncio.run(_awaited(result))
            ended.get()
        end = ended.get()
        assert end is not None
        if end.error is not None:
            raise end.error
        return end.result


_loop = _Loop()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _not_on(turn: int, place: int, message: Message | None) -> str:
    shown = "ends" if message is None else f"has {shortened(json.dumps(message), 80)}"
    return (
        f"the agent's request after turn {turn} {shown} at message {place + 1}, where it does not go "
        "on from the request before and its answer. An episode is one conversation that grows at "
        "its end"
    )


def _compared(message: Message) -> tuple[Any, ...]:
    """What two messages have in common that are one: clients change blanks and add fields."""
    calls = [one.get("id") for one in message.get("tool_calls") or ()]
    return message["role"], (message.get("content") or "").strip(), calls


def _added(turn: ModelTurn, message: Message) -> str | None:
    """What a client has put after the model's turn in its message; None where that is no such one.

    Thoughts are left out of it. Calls may be told in words, with their ids.
    """
    role, text, calls = _compared(message)
    made = [one.id for one in turn.calls]
    if role != "assistant":
        return None
    if made and not calls and all(id in text for id in made):
        return ""
    written = turn.content.strip()
    if calls != made or not text.startswith(written):
        return None
    added: str = text[len(written) :].strip()
    return added


def _given_back(turn: ModelTurn) -> Message:
    """A turn as its agent gives it back, without the thought."""
    return {**turn.message, "content": turn.content}


def _said(
    messages: Sequence[Message], request: AgentRequest, tools: Sequence[Mapping[str, Any]] = ()
) -> Given:
    """What is new in a request: messages, variables of the template, and the first one's tools."""
    said: dict[str, Any] = {"messages": messages}
    if tools:
        said["tools"] = tools
    if variables := request.turn.variables:
        said["chat_template_kwargs"] = variables
    return Given(observation=json.dumps(said, ensure_ascii=False))


# How servers answer a prompt that is too long: at that, agent programs end and give a reward.
_AT_LIMIT = refused(
    "the episode is over: it has reached a limit, of turns or of the model's context length",
    400,
    TOO_LONG,
)
_LET_GO = refused("the episode is over", 403)
