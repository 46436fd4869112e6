"""The owner's side of environments: episodes that are stepped, or played again where they are lost.

An episode is known by its name and by its turns so far. A turn that continues what a process holds
is stepped there. A turn that was answered before gets the same answer: a call that is retried never
steps twice. Anything else, such as an episode whose process died or which another worker began, is
opened anew from its seed and played again up to that turn, and has to get the same observations.
An agent, which asks for its turns by itself, is given all that it had, and has to ask for them.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeAlias

from configs.episodes import EpisodesConfig
from engines.environments.process import EnvironmentProcess
from engines.environments.protocol import (
    SECONDS,
    TURN_SECONDS,
    Act,
    Call,
    Close,
    EnvironmentReady,
    Finish,
    OpenSession,
    Outcome,
    Reply,
    TokenizerAnswers,
    Tokens,
    ToolCall,
    Turns,
)
from engines.processes.child_process import CallLost, CallTimedOut, ProcessDied
from storage.objects.documents import Row, digest

logger = logging.getLogger(__name__)

SESSIONS = 256  # that one process holds; beyond it those go first that were unused for longest
_OPENING = (
    "opening"  # the session in which a process resets an environment for its first observation
)

FINISHED = ("", "finished")  # in the place of a turn's text and calls

Calls: TypeAlias = "Sequence[ToolCall] | None"
# What the tokenizer makes of one of Outcome.tokenizer, asked for in an episode of the row.
Tokenizer: TypeAlias = "Callable[[Row, Mapping[str, Any]], Mapping[str, Any]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTurn:
    """A turn that the environment has answered."""

    text: str
    calls: Calls
    digest: str  # of the observation that answered it: `digest_of`
    tokens: Tokens | None = None  # for an environment that is told them


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of the model that the environment shall answer, and how the episode came to it."""

    episode: str  # a name that no other episode has
    row: Row  # of the data set, which the environment was reset with
    seed: int
    opening: str  # digest of its first observation, as `opening` gave it
    past: tuple[PastTurn, ...]
    text: str
    calls: Calls  # for an environment with tools; None: no calls
    tokens: Tokens | None = None  # for an environment that is told them


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTurns:
    """All turns of an episode whose environment asks for them by itself, in any order."""

    episode: str  # a name that no other episode has
    row: Row
    seed: int
    turns: Mapping[
        str, Callable[[], Mapping[str, Any]]
    ]  # by name, what makes one of protocol.Turns


Asked: TypeAlias = "Turn | GivenTurns"


def digest_of(observation: str) -> str:
    """The digest of an observation, by which an episode that is played again is compared."""
    return digest(observation.encode())


# A turn as it is compared: its text, its calls as JSON, and the digest of its answer.
_Played: TypeAlias = "tuple[str, str, str]"


@dataclass(slots=True, kw_only=True)
class _Session:
    """An episode as its process knows it; changes with every turn."""

    row: Row = field(default_factory=dict)
    played: list[_Played] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)  # the last answer
    seconds: float = 0.0  # of the environment since it was opened here
    given: set[str] = field(default_factory=set)  # names of the turns of one that asks for them

    def answered(self, past: list[_Played], action: tuple[str, str]) -> bool:
        """Whether its last turn was this one."""
        return bool(self.played) and self.played[:-1] == past and self.played[-1][:2] == action


class _Failed(Exception):
    """The episode has failed, by the fault of its environment."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.failed)
        self.outcome = outcome


class Environments:
    """The environments of one worker, in `config.processes` processes. Close it, or use it as a
    context. Safe to share by threads: the turns of one process queue up."""

    def __init__(
        self,
        config: EpisodesConfig,
        sessions: int = SESSIONS,
        frames: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`sessions`: how many each process holds at most. `frames`: whether answers have them.
        `tokenizer`: asked from several threads; None: what an agent asks it is the outcome."""
        self._players = [
            _Player(config, sessions, frames, tokenizer) for _ in range(config.processes)
        ]

    def start(self) -> EnvironmentReady:
        """Load the environment in every process now, all at once.

        ValueError, one sentence, when it cannot be loaded; NotStarted when a process fails.
        """
        started = [player.start() for player in self._players]
        ready = [future.result() for future in started]
        return ready[0]

    def opening(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[Outcome]:
        """The first observation of an episode for each of N rows and N seeds.

        An environment is reset for each, and let go. A reset that fails is an Outcome that has
        failed. Raises as `start` does.
        """
        waited = [
            self._players[i % len(self._players)].opening(row, seed)
            for i, (row, seed) in enumerate(zip(rows, seeds, strict=True))
        ]
        return [future.result() for future in waited]

    def act(self, turns: Sequence[Asked]) -> list[Outcome]:
        """The answers to N turns, of N episodes; of one that asks by itself, to all its turns.

        An episode that fails is an Outcome that has failed: what the environment raised, that it
        hung or took its process with it, with the stack. Raises as `start` does.
        """
        waited = [self._player(turn.episode).act(turn) for turn in turns]
        return [future.result() for future in waited]

    def finish(self, turns: Sequence[Asked]) -> list[Outcome]:
        """The last rewards of N episodes that are over after their past turns; they are let go of.

        Their `text` is not looked at. Raises, and fails, as `act` does.
        """
        waited = [self._player(turn.episode).act(turn, finish=True) for turn in turns]
        return [future.result() for future in waited]

    def close(self) -> None:
        """Kill the processes and what they started; a call under way fails."""
        for player in self._players:
            player.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _player(self, episode: str) -> _Player:
        """Where an episode is, or else where the fewest are."""
        for player in self._players:
            if player.knows(episode):
                return player
        return min(self._players, key=_Player.load)


class _Player:
    """One process, the episodes in it, and a thread in which its calls queue up.

    The dictionaries of episodes are changed in that thread only.
    """

    def __init__(
        self,
        config: EpisodesConfig,
        sessions: int,
        frames: bool,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.process = EnvironmentProcess(config, frames)
        self._tokenizer = tokenizer
        self._queue = ThreadPoolExecutor(max_workers=1, thread_name_prefix="environments")
        self._config = config
        self._sessions = sessions
        # Both: longest unused first. What has ended is kept for a call that is retried.
        self._open: OrderedDict[str, _Session] = OrderedDict()
        self._ended: OrderedDict[str, _Session] = OrderedDict()
        self._due: dict[str, Future[Outcome]] = {}  # turns that queue up, by episode

    def knows(self, episode: str) -> bool:
        return episode in self._open or episode in self._ended or episode in self._due

    def load(self) -> int:
        """How many episodes it has."""
        return len(self._open.keys() | self._due.keys())

    def start(self) -> Future[EnvironmentReady]:
        self.process.check_open()
        return self._queue.submit(self.process.start)

    def opening(self, row: Row, seed: int) -> Future[Outcome]:
        self.process.check_open()
        return self._queue.submit(self._opening, row, seed)

    def act(self, turn: Asked, finish: bool = False) -> Future[Outcome]:
        self.process.check_open()
        future = self._due[turn.episode] = self._queue.submit(self._act, turn, finish)
        return future

    def close(self) -> None:
        self.process.close()
        self._queue.shutdown(wait=False)  # what queues up there is refused

    def _opening(self, row: Row, seed: int) -> Outcome:
        outcome = self._reset(row, seed)
        again = outcome.out_of_memory or outcome.died  # see _act
        return self._reset(row, seed) if again else outcome

    def _reset(self, row: Row, seed: int) -> Outcome:
        try:
            outcome = self._open_one(_Session(), _OPENING, row, seed)
        except _Failed as failure:
            outcome = failure.outcome
        self._let_go([_OPENING], outcome)
        return outcome

    def _act(self, turn: Asked, finish: bool) -> Outcome:
        try:
            past, action = _played(turn)
            action = FINISHED if finish else action
            known = self._open.get(turn.episode) or self._ended.get(turn.episode)
            if known and known.answered(past, action):
                return known.outcome
            outcome = self._attempt(turn, past, action)
            # Others may have taken the memory, or somebody from outside ended the process.
            if outcome.out_of_memory or outcome.died:
                outcome = self._attempt(turn, past, action)
            return outcome
        finally:
            self._due.pop(turn.episode, None)

    def _attempt(self, turn: Asked, past: list[_Played], action: tuple[str, str]) -> Outcome:
        """Answer what has not been answered; the episode ends here if it is finished or fails."""
        finish, began = action == FINISHED, time.perf_counter()
        session = self._open.pop(turn.episode, None)
        self._ended.pop(turn.episode, None)
        outcome = None
        try:
            if session is not None and (isinstance(turn, GivenTurns) or session.played == past):
                outcome = self._answer(session, turn, finish)
            if session is None or outcome is None:
                session = _Session()
                if isinstance(turn, GivenTurns):
                    outcome = self._open_one(session, turn.episode, turn.row, turn.seed)
                    if outcome.failed is not None:
                        raise _Failed(outcome)
                    if turn.turns or finish:
                        outcome = self._answer(session, turn, finish)
                else:
                    self._play_again(session, turn, finish)
                    outcome = self._answer(session, turn, finish)
                assert outcome is not None, "the session was opened, and no call came between"
        except _Failed as failure:
            outcome = failure.outcome
        assert session is not None
        outcome = replace(outcome, seconds=time.perf_counter() - began)
        session.outcome = outcome
        session.played = [*past, (*action, digest_of(outcome.observation))]
        if finish or outcome.failed is not None:
            self._keep(self._ended, turn.episode, session)
            self._let_go([turn.episode], outcome)
        else:
            self._let_go(self._keep(self._open, turn.episode, session), outcome)
        return outcome

    def _answer(self, session: _Session, turn: Asked, finish: bool) -> Outcome | None:
        """The answer to the turns that were not answered, or at the end; None as `_step`."""
        if isinstance(turn, GivenTurns):
            names = turn.turns.keys() - session.given
            new = tuple(turn.turns[name]() for name in sorted(names))
            if new or not finish:
                reply = self._call(session, Turns(session=turn.episode, turns=new))
                if not isinstance(reply, Outcome):
                    return None
                session.given |= names
                if not finish or reply.failed is not None:
                    return reply
            return self._step(session, turn.episode, None)
        return self._step(session, turn.episode, None if finish else turn)

    def _play_again(self, session: _Session, turn: Turn, finish: bool) -> None:
        """Open the episode anew and play it up to this turn; `finish`: there is none any more."""
        first = self._open_one(session, turn.episode, turn.row, turn.seed)
        _compare(first, turn.opening, "its reset")
        for number, one in enumerate(turn.past, start=1):
            outcome = self._step(session, turn.episode, one)
            assert outcome is not None, "the session was opened, and no call came between"
            _compare(outcome, one.digest, f"turn {number}", finish and number == len(turn.past))

    def _open_one(self, session: _Session, name: str, row: Row, seed: int) -> Outcome:
        session.row = row
        reply = self._call(session, OpenSession(session=name, row=dict(row), seed=seed))
        assert isinstance(reply, Outcome)
        return reply

    def _step(self, session: _Session, name: str, turn: Turn | PastTurn | None) -> Outcome | None:
        """The answer to a turn, or at the end; None where the process has no such session."""
        call: Act | Finish = Finish(session=name)
        if turn is not None:
            call = Act(session=name, text=turn.text, calls=turn.calls, tokens=turn.tokens)
        reply = self._call(session, call)
        return reply if isinstance(reply, Outcome) else None

    def _call(self, session: _Session, call: OpenSession | Act | Turns | Finish) -> Reply:
        """The answer of the process; _Failed where it does not come in time, or at all.

        An answer after which the episode has no seconds left has the limit SECONDS. Only its driver
        looks at that, who ends the episode: the environment can still be asked for a last reward, an
        episode that is over can be played again, however long that takes, and others of its process
        go on.
        """
        self.process.start()  # its time is not the episode's
        most, turn = self._config.timeout, self._config.turn_timeout
        began = time.perf_counter()
        try:
            reply = self._answered(session, call, turn)
        except CallTimedOut as error:
            said = f"the environment took longer than episodes.turn_timeout = {turn:g} s"
            raise _failed(f"{said}\n{error.stacks}", limit=TURN_SECONDS) from None
        except ProcessDied as error:
            raise _failed(f"the environment failed: {error}\n{error.stacks}", died=True) from None
        session.seconds += time.perf_counter() - began
        if session.seconds < most or not isinstance(reply, Outcome):
            return reply
        return replace(reply, limit=SECONDS)

    def _answered(self, session: _Session, call: Call, seconds: float) -> Reply:
        """The answer of the process, once what it asks the tokenizer is answered."""
        reply = self.process.call(call, seconds)
        while self._tokenizer is not None and isinstance(reply, Outcome) and reply.tokenizer:
            assert not isinstance(call, Close), "nobody asks at its end"
            answers = tuple(self._tokenizer(session.row, one) for one in reply.tokenizer)
            reply = self.process.call(
                TokenizerAnswers(session=call.session, answers=answers), seconds
            )
        return reply

    def _keep(
        self, among: OrderedDict[str, _Session], episode: str, session: _Session
    ) -> list[str]:
        """Keep an episode; the names of those that go for it."""
        among[episode] = session
        return [among.popitem(last=False)[0] for _ in range(len(among) - self._sessions)]

    def _let_go(self, episodes: Sequence[str], outcome: Outcome) -> None:
        """Close sessions after an outcome. What goes wrong there is no fault of an episode."""
        if outcome.out_of_memory:
            self.process.stop()
        if not episodes or not self.process.running():
            return
        try:
            self.process.call(Close(sessions=tuple(episodes)), self._config.turn_timeout)
        except CallLost as error:
            logger.warning(
                "The environments of %s were closed, and that %s.\n%s",
                episodes,
                error,
                error.stacks,
            )


def _played(turn: Asked) -> tuple[list[_Played], tuple[str, str]]:
    """What was played before a turn, and the turn, as they are compared."""
    if isinstance(turn, GivenTurns):
        return [], _action(json.dumps(sorted(turn.turns)), None)
    past = [(*_action(one.text, one.calls), one.digest) for one in turn.past]
    return past, _action(turn.text, turn.calls)


def _action(text: str, calls: Calls) -> tuple[str, str]:
    return text, json.dumps(calls, sort_keys=True)


def _compare(outcome: Outcome, before: str, what: str, over: bool = False) -> None:
    """_Failed unless what is played again gets its answer again, and goes on or is over."""
    if outcome.failed is not None:
        raise _Failed(outcome)
    if digest_of(outcome.observation) != before or (outcome.done and not over):
        raise _failed(
            f"the environment is not deterministic: with the same seed and actions, {what} was "
            "answered differently when the episode was played again"
        )


def took_too_long(seconds: float) -> str:
    """What is said of an episode whose environment has used up its seconds."""
    return f"the environment took longer than episodes.timeout = {seconds:g} s"


def _failed(text: str, died: bool = False, limit: str = "") -> _Failed:
    return _Failed(Outcome(failed=text.rstrip(), died=died, limit=limit))
