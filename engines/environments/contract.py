"""What every kind of environment is to the process that holds it, and the check of what it gives.

Runs in the process of the environments: only the standard library is imported.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Real
from types import ModuleType
from typing import Any, Protocol

from engines.environments.protocol import EnvironmentReady, Frame, Outcome, PlayersTurn, ToolCall
from engines.processes.user_code import shortened, source_digests

OBSERVATION_BYTES = 65536  # of UTF-8: the longest observation
LARGEST_REWARD = 3e38  # what a float32 holds
FRAME_BYTES = 16 * 2**20  # the largest frame


class NotAllowed(Exception):
    """The environment gave what it may not give; the text is a sentence about it."""


class Lost(Exception):
    """The environment is gone, by no fault of its own: the episode can be played again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What an environment gave, before it is checked."""

    observation: Any  # text; None: nothing to say
    reward: Any = None  # a finite number; None: it has none to give
    by_branch: Mapping[str, Any] = field(default_factory=dict)  # as in Outcome
    rewards: tuple[Any, ...] = ()  # of each of several players
    done: bool = False
    results: tuple[Any, ...] = ()  # of each tool call, text
    frame: Any = None  # an array of numpy, or what makes one; None: none is kept
    used: int | None = None  # as in Outcome
    longest: int = OBSERVATION_BYTES  # that its observation may be
    tokenizer: Sequence[Mapping[str, Any]] = ()  # as in Outcome


class EnvironmentAdapter(Protocol):
    """One environment that plays one episode."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        """Begin the episode. With several players observations are a `Told` as JSON."""

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        """Answer a turn, of the player whose turn it is."""

    def finish(self) -> Given:
        """The episode is over, by whoever's will: a reward for all of it, if there is one to give."""

    def close(self) -> None:
        """Let go of what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An environment that was found to load."""

    make: Callable[[], EnvironmentAdapter]
    ready: EnvironmentReady


def library(name: str) -> ModuleType:
    """An optional library; ValueError, which says what to do, where it is not installed."""
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ValueError(
            f"{package} is not installed where it runs. Use `pip install {package}` there, or set "
            "episodes.python to an interpreter that has it"
        ) from error


def checked(given: Given) -> Outcome:
    """What an environment gave, as the owner gets it; NotAllowed where it may not give that."""
    results = tuple(_text(result) for result in given.results)
    observation = "\n".join(results) if results else _text(given.observation)
    size = len(observation.encode())
    if size > given.longest:
        raise NotAllowed(
            f"the environment gave an observation of {size} bytes; at most {given.longest} are "
            "allowed"
        )
    return Outcome(
        observation=observation,
        reward=_reward(given.reward),
        rewards=tuple(map(_reward, given.rewards)),
        by_branch=_rewards_by_branch(given.by_branch),
        done=given.done,
        results=results,
        frame=None if given.frame is None else frame_of(given.frame),
        used=given.used,
        tokenizer=given.tokenizer,
    )


def _rewards_by_branch(given: Mapping[Any, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, reward in given.items():
        number = _reward(reward)
        if not isinstance(name, str):
            raise NotAllowed(f"the environment gave a reward to {_shown(name)}, no branch's name")
        if number is not None:
            found[name] = number
    return found


def frame_of(given: Any) -> Frame:
    """An image or a state as it is sent: numbers of 8 bits as they are, others as float32."""
    numpy = library("numpy")
    array = numpy.asarray(given)
    if array.dtype != numpy.uint8:
        if array.dtype.kind not in "biuf":
            raise NotAllowed(
                f"the environment gave {_shown(given)} as a frame, no array of numbers"
            )
        array = array.astype(numpy.float32)
        if not numpy.isfinite(array).all():
            raise NotAllowed("the environment gave a frame with a number that no float32 holds")
    if not 0 < array.nbytes <= FRAME_BYTES:
        raise NotAllowed(
            f"the environment gave a frame of {array.nbytes} bytes; 1 to {FRAME_BYTES} are allowed"
        )
    return {"dtype": str(array.dtype), "shape": array.shape, "data": array.tobytes()}


def told(player: Any, texts: Iterable[Any], players: int) -> str:
    """What an environment of several players says, as an observation; NotAllowed.

    player: who is next. texts: what each player is told, or that one.
    """
    if isinstance(player, bool) or not isinstance(player, int) or not 0 <= player < players:
        raise NotAllowed(
            f"the environment gave {_shown(player)} as the player who is next; they are 0 to "
            f"{players - 1}"
        )
    return PlayersTurn(player=player, texts=tuple(map(_text, texts))).to_json()


def of_players(rewards: Any, players: int) -> tuple[Any, ...]:
    """Rewards as an environment gives them, one of each player; () for None. NotAllowed.

    A list has all, a dict by number those that there are: {1: 0.5} of two is (None, 0.5).
    """
    if rewards is None:
        return ()
    if isinstance(rewards, Mapping) and rewards.keys() <= set(range(players)):
        return tuple(rewards.get(player) for player in range(players))
    if isinstance(rewards, (list, tuple)) and len(rewards) == players:
        return tuple(rewards)
    raise NotAllowed(
        f"the environment gave {_shown(rewards)} as rewards; they are a list of {players}, or a dict "
        f"by players from 0 to {players - 1}"
    )


def _text(observation: Any) -> str:
    if observation is None:
        return ""
    if not isinstance(observation, str):
        raise NotAllowed(f"the environment gave {_shown(observation)} as an observation, no text")
    # A model may write half of a surrogate pair as JSON, and a tool give it back.
    return observation.encode(errors="replace").decode()


def _reward(reward: Any) -> float | None:
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, Real):
        raise NotAllowed(f"the environment gave {_shown(reward)} as a reward, no number")
    number = float(reward)
    if not math.isfinite(number) or abs(number) > LARGEST_REWARD:
        raise NotAllowed(f"the environment gave the reward {number}, which is no finite float32")
    return number


def _shown(value: Any) -> str:
    return f"{shortened(repr(value), 60)} ({type(value).__name__})"


def digest_of(code: Iterable[Callable[..., Any]]) -> str:
    """sha256 of the lines of functions or classes, and of the files that they are in."""
    total = hashlib.sha256()
    for one in code:
        total.update("".join(source_digests(one)).encode())
    return f"sha256:{total.hexdigest()}"
