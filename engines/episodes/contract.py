"""What the flow process asks of the engines that have the environments of episodes. Free of torch.

Kept by engines/episodes/environment_engine.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from configs.data import Source
from configs.episodes import EpisodesConfig
from engines.data.contract import PromptMaker, RowsSpec, SampleFailure
from storage.batches.refs import BatchRef

# Why an episode ended (column `episode`).
DONE = "done"  # the environment said so, or the model called no tool
TURNS = "turns"  # episodes.max_turns
TURN_TOKENS = "turn_tokens"  # episodes.max_turn_tokens
TOKENS = "tokens"  # rollout.max_new_tokens, of the whole conversation
PATHS = "paths"  # of all paths together: as many tokens as a micro-batch takes of one sample
DEADLINE = "deadline"  # episodes.deadline
# "turn_seconds" and "seconds" are limits of the environment's (engines/environments/protocol.py).
FAILED = "failed"  # of machinery otherwise; see `episode_error`

ENVIRONMENT_FAILED = "environment_failed"  # why a row gives no prompt: its reset failed


class EnvironmentFailed(RuntimeError):
    """No episode can begin; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpponentSeats:
    """Who plays the seats that the policy does not."""

    digest: str  # of its weights
    policy_plays: Literal["in_turn"] | int  # episodes.opponent.policy_plays

    def seats(self, groups: NDArray[np.int64], players: int) -> NDArray[np.bool_]:
        """[P, players]: the seats that it has, of prompts with these numbers [P].

        Groups [6, 7] of two players, in turn: [[0, 1], [1, 0]].
        """
        fixed = None if self.policy_plays == "in_turn" else self.policy_plays
        policy = groups % players if fixed is None else np.full(len(groups), fixed)
        return np.arange(players) != policy[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRequest:
    """Episodes of which some wait for their environments."""

    samples: BatchRef  # as the rollout engine wrote them
    stage: str = ""  # what they are for; sample numbers are those of a stage
    source: Source | None = None  # of their rows; None: the data set
    frames: bool = False  # whether those of the answers are written
    # That sampling the episodes' turns took so far, for their deadline.
    sampled_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRequest:
    """Episodes of requests, and the turns of the policy that some of these waited for."""

    prompts: BatchRef  # [P]
    n: int  # episodes of each
    begun: BatchRef | None = None  # as `go_on` wrote them; None: they are opened
    # As the rollout engine wrote them, one for each row of `pending`; None: it is written again.
    turns: BatchRef | None = None
    stage: str = ""  # as in AnswerRequest, and so are the next two
    source: Source | None = None
    sampled_seconds: float = 0.0
    group: int = 0  # as in Sampling; 0: n
    first: int = 0  # as in Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerResult:
    """The episodes of a shard after the environments' answers."""

    ref: BatchRef  # the samples, those with the status UNFINISHED to go on with
    unfinished: int  # samples of episodes that go on, one of each player
    turns: int  # of the model, that were answered
    failures: tuple[SampleFailure, ...]
    seconds: float  # that all answers together took
    opponents: int = 0  # episodes in which an opponent's turn is next
    # A row for each request that waits for a turn, of episodes of requests: its prompt_ids are all
    # that it is after, its group_id is its sample's number. None: none waits.
    pending: BatchRef | None = None
    # A row for each answer that has one: sample_id, turn (from 0), frame. None: there are none.
    frames: BatchRef | None = None

    def record(self) -> dict[str, object]:
        """As the mark of finished answers has it."""
        return {
            "ref": self.ref.to_json(),
            "unfinished": self.unfinished,
            "turns": self.turns,
            "failures": [asdict(failure) for failure in self.failures],
            "seconds": self.seconds,
            "opponents": self.opponents,
            "pending": None if self.pending is None else self.pending.to_json(),
            "frames": None if self.frames is None else self.frames.to_json(),
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> AnswerResult:
        """Finished answers by their mark; that of an older Refrain has fewer fields."""
        refs = {
            name: BatchRef.from_json(record[name])
            for name in ("ref", "pending", "frames")
            if record.get(name) is not None
        }
        failures = tuple(SampleFailure(**failure) for failure in record["failures"])
        return cls(**{**record, **refs, "failures": failures})


class EnvironmentSpec(RowsSpec):
    """From what the engine is built; max_new_tokens are those of a whole conversation."""

    path_tokens: int | None = Field(
        None,
        description="Tokens of an episode's paths together, those that they share counted in each.",
    )
    episodes: EpisodesConfig = Field(description="The environment, and the limits of an episode.")
    frames: bool = Field(False, description="Whether frames are kept of what there is to see.")


class EnvironmentHost(PromptMaker):
    """Has the environments of episodes: opens them, and answers what the policy says."""

    @abstractmethod
    def deal(
        self, prompts: BatchRef, n: int, out_key: str, opponent: OpponentSeats | None = None
    ) -> tuple[BatchRef, BatchRef]:
        """Prompts as rows of their players, and n samples of each before its first turn."""

    @abstractmethod
    def answer(self, request: AnswerRequest, out_key: str) -> AnswerResult:
        """Step the environments of the episodes whose turn is over, and write what they said.

        An environment that fails makes its sample FAILED; one that ends, or a limit, ends the
        episode, for all its players.
        """

    @abstractmethod
    def go_on(self, request: RoundRequest, out_key: str) -> AnswerResult:
        """Give the turns that requests waited for, and write what is asked for next, in `pending`.

        For episodes of requests (EpisodesConfig.of_requests).
        """

    @abstractmethod
    def gather(
        self, prompts: BatchRef, n: int, samples: Sequence[BatchRef | None], out_key: str
    ) -> BatchRef:
        """Write samples that lie apart as one batch: row i belongs to row i // n of `prompts`.

        samples: one row each, with the same columns; None: nothing of it was sampled yet.
        """
