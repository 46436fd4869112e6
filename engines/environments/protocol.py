"""What a process of environments and its owner say to each other.

One process holds many sessions; a session is one environment that plays one episode. All messages
are packed (engines/processes/user_code.py), the first too. Only the standard library is
imported: the process may run under another interpreter than its owner, from Python 3.10 on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engines.processes import user_code
from engines.processes.user_code import Broken, Packed, by_name

ToolCall: TypeAlias = "Mapping[str, Any]"  # {"name": str, "arguments": dict}
# Of a turn: "written", its token ids.
Tokens: TypeAlias = "Mapping[str, Any]"
# An image or a state: "dtype" (uint8 or float32), "shape", and "data", its bytes row by row.
Frame: TypeAlias = "Mapping[str, Any]"

# Limits of the environment's seconds, as the column `episode` names them.
TURN_SECONDS = "turn_seconds"  # episodes.turn_timeout: it did not answer a turn in time
SECONDS = "seconds"  # episodes.timeout, of all turns together


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStart:
    """The first message: which environment to hold sessions of."""

    name: str  # what messages call the environment
    kind: str  # class, tools, gymnasium, textarena, openenv, agent or workspace
    path: str  # import path: of the class, or of a codec; empty for none
    id: str  # name in the library's registry, or a server's URL; empty for a class
    params: Mapping[str, Any]  # keyword arguments of making one
    memory: int  # bytes that the process may have
    players: int = 1  # of an episode
    frames: bool = False  # whether a frame goes with each answer
    functions: Sequence[str] = ()  # import paths of functions that are tools
    workspace: Mapping[str, Any] | None = None  # settings of a workspace, which is part of it


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReady:
    """The environment is loaded, and what it is."""

    digest: str  # sha256 of its code, as far as that can be read
    packages: Mapping[str, str]  # versions of its packages that are installed
    tools: Sequence[Mapping[str, Any]]  # JSON schemas; empty where it takes text
    # Whether it asks by itself, several turns at once too: its observations are JSON, {"requests":
    # those that wait, by name}, and it is given `Turns`.
    chats: bool = False
    in_part: bool = False  # whether it says how much of the last turn it acted on
    tokens: bool = False  # whether it is told the tokens of each turn, without `chats`


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Begin a session with a new environment, and reset it; answered by its Outcome."""

    session: str
    row: Mapping[str, Any]  # of the data set
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One turn of the model; answered by an Outcome, or NoSession."""

    session: str
    text: str
    calls: Sequence[ToolCall] | None  # for an environment with tools; None: no calls
    tokens: Tokens | None = None  # for one that is told them


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Turns of the model for an environment that asks by itself; answered as Act is.

    Each has the name of the request that it answers and `refused`, or its text, calls, prompt_ids
    (token ids of all before it), ids, logprobs, and whether it was cut at a limit of tokens. Those
    that were given before are left out.
    """

    session: str
    turns: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerAnswers:
    """What the tokenizer makes of each of an Outcome's `tokenizer`, in order; answered as Act is.

    Each has what was asked for, of `ids`, `tokens` (their texts) and `text`, or a sentence `refused`.
    """

    session: str
    answers: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The episode is over; answered by an Outcome with a last reward, or NoSession."""

    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """End sessions; answered by Closed. Those that are not there are left out."""

    sessions: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The sessions have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSession:
    """The process has no such session: it was started anew since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the environment answered. Where `failed` is set nothing else counts.

    A turn with two tool calls: observation "4\\nError: KeyError: 'x'", results ("4", "Error: …").

    With several players the observation is JSON (`Told`), or nothing once the episode has ended.
    """

    observation: str = ""
    reward: float | None = None  # None: it gave none
    rewards: tuple[float | None, ...] = ()  # of each of several players; (): it gave none
    by_branch: Mapping[str, float] = field(
        default_factory=dict
    )  # an agent's, where it gave them so
    done: bool = False  # whether the episode has ended
    failed: str | None = (
        None  # one sentence, and after it the lines of a traceback where there is one
    )
    results: tuple[str, ...] = ()  # of each tool call; the observation is these, joined by newlines
    died: bool = False  # whether it failed because the process or the server ended
    limit: str = ""  # TURN_SECONDS or SECONDS, where that was reached; with `failed` or without
    # That it took, an episode that was played again with it.
    seconds: float = field(default=0.0, compare=False)
    out_of_memory: bool = False  # whether it failed because the process has all its memory
    frame: Frame | None = field(default=None, compare=False)  # of what there is to see now
    # Characters of the turn (tokens, where it is told those) up to the action that ended the
    # episode; None: all of them counted.
    used: int | None = None
    # What an agent asks of the tokenizer, which its owner has: while there is any nothing else is
    # said. Each is a text, token ids, or a request for a turn with the turn before it.
    tokenizer: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayersTurn:
    """What an environment of several players says: whose turn it is, and what they are told.

    When it is reset it tells all players something, player 0 first; after a turn only the one who
    is next: {"player": 1, "texts": ["You were bid 3."]}.
    """

    player: int  # who is next, from 0
    texts: tuple[str, ...]  # of every player, or of that one

    def to_json(self) -> str:
        """As an observation."""
        return json.dumps({"player": self.player, "texts": self.texts}, ensure_ascii=False)

    @classmethod
    def of(cls, observation: str) -> PlayersTurn:
        """What `to_json` wrote."""
        found = json.loads(observation)
        return cls(player=found["player"], texts=tuple(found["texts"]))


Message: TypeAlias = (
    "EnvironmentStart | EnvironmentReady | Broken | OpenSession | Act | Turns | TokenizerAnswers | "
    "Finish | Close | Closed | NoSession | Outcome"
)
Call: TypeAlias = "OpenSession | Act | Turns | TokenizerAnswers | Finish | Close"
Reply: TypeAlias = "Outcome | Closed | NoSession"

_MESSAGES = by_name(
    EnvironmentStart,
    EnvironmentReady,
    Broken,
    OpenSession,
    Act,
    Turns,
    TokenizerAnswers,
    Finish,
    Close,
    Closed,
    NoSession,
    Outcome,
)


def unpacked(message: Packed) -> Message:
    """The message that `packed` took apart."""
    return user_code.unpacked(message, _MESSAGES)
