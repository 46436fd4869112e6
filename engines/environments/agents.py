"""Agents: programs that ask the model over the API of OpenAI or Anthropic, as environments.

An agent runs in a thread of this process, and is given the address and a key of a server that only
this machine reaches. Each request of it is a turn: what waits for the model is what the environment
says, and what the model writes is the answer to it. A request that goes on from an earlier one and
its answer names that turn, and what is new after it; any other begins a conversation.

Of ours only what needs the standard library alone is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from configs.imports import described
from engines.environments.agent_api import (
    MOST_BODY,
    SEND_SECONDS,
    TOO_LONG,
    AgentRequest,
    AgentTokenizerRequest,
    Answer,
    Refusal,
    Server,
    refused,
)
from engines.environments.agent_protocols import (
    MODEL,
    Message,
    ModelTurn,
    TokenizerRequest,
    TurnRequest,
)
from engines.environments.contract import Given, Loaded, NotAllowed, digest_of
from engines.environments.protocol import EnvironmentReady, EnvironmentStart, ToolCall

BLOCKED_SECONDS = 5.0  # in which the event loop of agents takes up another, or is blocked
PAUSE_SECONDS = 0.1  # without a request, after which those that wait are all that come together
AGAIN_SECONDS = 5.0  # the same while an agent that was begun again has turns that it will ask for
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


_Event: TypeAlias = "AgentRequest | AgentTokenizerRequest | _End"


@dataclass(slots=True)
class _Session:
    """What goes on between an agent, the server's threads and the adapter."""

    events: SimpleQueue[_Event] = field(default_factory=SimpleQueue)
    heard: float = 0.0  # when the last of them came, by time.monotonic
    over: Refusal | None = None  # what every request is answered from now on
    # The conversation up to each response, without instructions, by the response's id.
    responses: dict[str, list[Message]] = field(default_factory=dict)

    def ask(self, request: AgentRequest) -> Answer:
        """Wait for the model's turn."""
        previous = request.turn.previous
        if previous and previous not in self.responses:
            text = f"previous_response_id is {previous[:60]}, which is no response of this episode"
            return refused(text, 400, "previous_response_not_found")
        self.put(request)
        return request.answer.get()

    def ask_tokenizer(self, request: AgentTokenizerRequest) -> Mapping[str, Any] | Refusal:
        """Wait for the tokenizer, which answers once all that waits is looked at."""
        self.put(request)
        return request.answer.get()

    def put(self, event: _Event) -> None:
        self.heard = time.monotonic()
        self.events.put(event)


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A request, however often its client has sent it."""

    sent: list[AgentRequest]  # each time
    names: list[str]  # of the turns that answer it
    chat: list[Message]  # the conversation that it stands for
    read: list[Message]  # the same with the model's turns as the model wrote them
    after: str = ""  # name of the turn from which it goes on; empty: from none
    new: int = 0  # messages of `read` that come after that turn
    tools: list[dict[str, Any]] = field(default_factory=list)
    answer: Answer | None = None

    @property
    def turn(self) -> TurnRequest:
        return self.sent[0].turn

    def is_sent_again(self, request: AgentRequest) -> bool:
        """Whether an equal request is this one, sent again by a client that has no answer to it.

        Its client says so, or sends the same Idempotency-Key, or has closed the connection.
        """
        if request.again or (request.key and request.key in {one.key for one in self.sent}):
            return True
        if self.answer is None:
            return all(one.left() for one in self.sent)
        return not any(one.taken.result(timeout=2 * SEND_SECONDS) for one in self.sent)

    def to_json(self, name: str) -> dict[str, Any]:
        """As it is told of in an observation, by one of its names."""
        about = {"name": name, "branch": self.sent[0].branch}
        if self.turn.ids is not None:
            return {**about, "ids": self.turn.ids}
        return {**about, **self.conversation, "chat_template_kwargs": self.turn.variables}

    @property
    def conversation(self) -> dict[str, Any]:
        """What it asks the turn after, as it is told."""
        return {"after": self.after, "new": self.new, "messages": self.read, "tools": self.tools}


class AgentAdapter:
    """One agent that plays one episode.

    A request is told apart from others by its name: of what it asks, and how often that was asked
    before. So an agent that is begun again gets the turns that it had, in whatever order it asks.
    """

    def __init__(
        self, server: Server, agent: Callable[..., Any], params: Mapping[str, Any]
    ) -> None:
        self._server = server
        self._agent = agent
        self._params = params
        self._key = secrets.token_urlsafe(24)
        self._session = _Session()
        self._asked: dict[str, list[_Asked]] = {}  # by what is asked, in the order in which it came
        self._turns: dict[str, Mapping[str, Any]] = {}  # that were given, by name
        self._unasked: set[str] = set()  # of these, those that nothing has asked for
        # Requests that have turns, and these, by the digest of the messages before the turn.
        self._places: dict[bytes, list[tuple[_Asked, str, ModelTurn]]] = {}
        self._to_tokenizer: list[AgentTokenizerRequest] = []  # that wait for it
        self._refused = False  # whether a request was told of a limit
        self._end: Given | None = None  # once the agent has ended

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        """The agent's first requests."""
        self._server.sessions[self._key] = self._session
        given = {**row, **self._params, "seed": seed, "model": MODEL}
        given |= {"base_url": self._server.url, "api_key": self._key}
        names = _parameters(self._agent)
        arguments = {k: v for k, v in given.items() if names is None or k in names}
        threading.Thread(target=self._run, args=(arguments,), daemon=True).start()
        return self._next()

    def take(self, turns: Sequence[Mapping[str, Any]]) -> Given:
        """Answer requests by these turns (Turns.turns): those that wait then, or its reward."""
        for turn in turns:
            if turn["name"] not in self._turns:
                self._turns[turn["name"]] = turn
                self._unasked.add(turn["name"])
        for asked in self._all():
            self._give(asked)
        return self._next()

    def tokenized(self, answers: Sequence[Mapping[str, Any]]) -> Given:
        """Answer what the tokenizer was asked, and go on as `take` does."""
        for request, made in zip(self._to_tokenizer, answers, strict=True):
            said = made.get("refused")
            request.answer.put(made if said is None else refused(said, 400))
        self._to_tokenizer.clear()
        return self._next()

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        raise AssertionError("an agent is given turns by the names of its requests")

    def finish(self) -> Given:
        """Tell an agent that waits for a turn that there is none; its reward, if it returns one."""
        self._session.over = _AT_LIMIT
        if self._end is not None:
            return Given(observation=None)
        for asked in self._all():
            if asked.answer is None:
                self._answer(asked, _AT_LIMIT)
        while not isinstance(event := self._session.events.get(), _End):
            event.answer.put(_AT_LIMIT)
        self._check_all_asked()
        return _given(event.result)

    def close(self) -> None:
        self._session.over = _LET_GO
        self._server.sessions.pop(self._key, None)
        for asked in self._all():
            if asked.answer is None:
                self._answer(asked, _LET_GO)
        with contextlib.suppress(Empty):
            while True:
                if not isinstance(event := self._session.events.get_nowait(), _End):
                    event.answer.put(_LET_GO)

    def _all(self) -> list[_Asked]:
        return [asked for equal in self._asked.values() for asked in equal]

    def _next(self) -> Given:
        """The requests that wait, once nothing has come for a while; or the reward, at the end."""
        if self._end is not None:
            return self._end
        while True:
            waits = [asked for asked in self._all() if asked.answer is None]
            seconds = None
            if waits:
                pause = AGAIN_SECONDS if self._unasked else PAUSE_SECONDS
                seconds = max(0.0, self._session.heard + pause - time.monotonic())
            try:
                event = self._session.events.get(timeout=seconds)
            except Empty:
                break
            if isinstance(event, _End):
                return self._ended(event)
            if isinstance(event, AgentTokenizerRequest):
                self._to_tokenizer.append(event)
                asked = self._asked_of_tokenizer(event.asked)
                return Given(observation=None, tokenizer=(asked,))
            self._hear(event)
        told = [
            asked.to_json(name)
            for asked in waits
            for name in asked.names
            if name not in self._turns
        ]
        told.sort(key=itemgetter("name"))
        text = json.dumps({"requests": told}, ensure_ascii=False)
        return Given(observation=text, longest=MOST_BODY)

    def _asked_of_tokenizer(self, request: TokenizerRequest) -> dict[str, Any]:
        """As it is told of in Outcome.tokenizer."""
        asks = request.turn
        if asks is None:
            asked = {"text": request.text, "special": request.special, "of_ids": request.ids}
            return {**asked, "texts": request.texts}
        chat = self._chat(asks)
        one = _Asked(sent=[], names=[], chat=chat, read=chat, new=len(chat), tools=asks.tools)
        turn = self._find_turn_before(one)
        past = [] if turn is None else [*turn.prompt_ids, *turn.ids]
        about = {"past": past, "ended": turn is None or not turn.cut, "texts": request.texts}
        return {**about, "request": {**one.conversation, "chat_template_kwargs": asks.variables}}

    def _ended(self, end: _End) -> Given:
        if not self._asked and end.error is None:
            raise NotAllowed("the agent ended before it had asked the model anything")
        if end.error is not None and not self._refused:
            raise end.error
        self._check_all_asked()
        self._end = replace(_given(end.result), done=True)
        return self._end

    def _check_all_asked(self) -> None:
        """NotAllowed where it was begun again, and has not asked what it had asked before."""
        if self._unasked:
            raise NotAllowed(
                "the environment is not deterministic: when the episode was played again, the agent "
                f"did not ask for {len(self._unasked)} of its {len(self._turns)} turns"
            )

    def _hear(self, request: AgentRequest) -> None:
        """A request becomes one that waits, or is answered, where its turn is known."""
        asks = request.turn
        chat = self._chat(asks)
        said = [chat, asks.ids, asks.tools, asks.variables, asks.n, request.branch]
        key = blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=8).hexdigest()
        equal = self._asked.setdefault(key, [])
        for asked in reversed(equal):
            if asked.is_sent_again(request):
                asked.sent.append(request)
                if asked.answer is not None:
                    request.answer.put(asked.answer)
                return
        first = sum(len(one.names) for one in equal)
        names = [f"{key}/{first + number}" for number in range(asks.n)]
        asked = _Asked(
            sent=[request], names=names, chat=chat, read=chat, new=len(chat), tools=asks.tools
        )
        if asks.ids is None:
            self._find_turn_before(asked)
        equal.append(asked)
        self._give(asked)

    def _chat(self, asks: TurnRequest) -> list[Message]:
        """The conversation that a request stands for."""
        past = self._session.responses[asks.previous] if asks.previous else []
        return [*asks.instructions, *past, *asks.messages]

    def _find_turn_before(self, asked: _Asked) -> ModelTurn | None:
        """From which turn a conversation goes on: the last one that it has with all before it."""
        chat = asked.chat
        found: list[tuple[bool, str, _Asked, ModelTurn, list[Message]]] = []
        for place, digest in reversed(list(enumerate(_digests(chat), start=1))):
            for before, name, turn in self._places.get(digest, ()):
                if asked.tools and asked.tools != before.tools:
                    continue  # they stand at the beginning
                new = _after(turn, chat, place)
                if new is not None and _may_follow(new):
                    found.append((new != chat[-len(new) :], name, before, turn, new))
            if found:
                break
        else:
            return None
        _, asked.after, before, turn, new = min(found, key=lambda one: one[:2])
        asked.tools = before.tools
        asked.read = [*before.read, {"role": "assistant", "content": turn.text}, *new]
        asked.new = len(new)
        return turn

    def _give(self, asked: _Asked) -> None:
        """Answer a request whose turns are known."""
        if asked.answer is not None or not all(name in self._turns for name in asked.names):
            return
        self._unasked -= {*asked.names}
        given = [self._turns[name] for name in asked.names]
        if any(one.get("refused") for one in given):
            self._refused = True
            self._answer(asked, _TOO_LONG)
            return
        asks, made = asked.turn, []
        for name, one in zip(asked.names, given, strict=True):
            calls = one["calls"] if asked.tools and asks.gives_calls else None
            id = blake2b(name.encode(), digest_size=8).hexdigest()
            more = {name: one[name] for name in ("cut", "prompt_ids", "ids", "logprobs")}
            made.append(ModelTurn.of(one["text"], calls, asks.stop, id=id, **more))
        if asks.ids is None:
            digest = b"".join(deque(_digests(asked.chat), maxlen=1))
            for name, turn in zip(asked.names, made, strict=True):
                self._places.setdefault(digest, []).append((asked, name, turn))
            said = [*asked.chat[len(asks.instructions) :], _given_back(made[0])]
            self._session.responses[f"resp_{made[0].id}"] = said
        self._answer(asked, replace(made[0], others=tuple(made[1:])))

    def _answer(self, asked: _Asked, answer: Answer) -> None:
        asked.answer = answer
        for request in asked.sent:
            request.answer.put(answer)

    def _run(self, arguments: Mapping[str, Any]) -> None:
        try:
            result = self._agent(**arguments)
            if inspect.isawaitable(result):
                result = _loop.run(result)
            self._session.put(_End(result, None))
        except BaseException as error:  # of a user's code: any, sys.exit too
            if not isinstance(error, Exception):
                error = RuntimeError(f"the agent left by {described(error)}")
            self._session.put(_End(None, error))


def _given(result: Any) -> Given:
    """What an agent has returned: a reward, of which a boolean is one too, or several by branch."""
    if isinstance(result, Mapping):
        return Given(observation=None, by_branch=result)
    reward = float(result) if isinstance(result, bool) else result
    return Given(observation=None, reward=reward)


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


def _digests(chat: Sequence[Message]) -> Iterator[bytes]:
    """Of the first message, of the first two, and so on: equal where `_compared` are."""
    running = blake2b(digest_size=16)
    for message in chat:
        running.update(json.dumps(_compared(message)).encode())
        yield running.digest()


def _after(turn: ModelTurn, chat: Sequence[Message], place: int) -> list[Message] | None:
    """What a conversation has after its first `place` messages and this turn; None where it has not
    that turn, or nothing after it."""
    added: str | None = ""
    empty = not turn.content.strip() and not turn.calls  # clients leave such a turn out
    if len(chat) > place and not (empty and chat[place]["role"] != "assistant"):
        added = _added(turn, chat[place])
        place += 1
    new = list(chat[place:])
    if added is None or not new:
        return None
    if added:
        new[0] = {**new[0], "content": f"{added}\n\n{new[0]['content']}"}
    return new


def _may_follow(messages: Sequence[Message]) -> bool:
    """Whether they can be told between two turns of the model: results of tools, then a user's."""
    roles = [message["role"] for message in messages]
    results = roles.count("tool")
    return roles == ["tool"] * results + ["user"] * (len(roles) - results)


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


# How servers answer a prompt that is too long: at that, agent programs end and give a reward.
_AT_LIMIT = refused(
    "the episode is over: it has reached a limit, of turns or of the model's context length",
    400,
    TOO_LONG,
)
_TOO_LONG = refused(
    "the request does not fit: it has reached a limit of the model's context length, or of turns",
    400,
    TOO_LONG,
)
_LET_GO = refused("the episode is over", 403)
