"""What the data engines are built from, what their calls return, and their errors.

Free of torch, as all that the flow process imports. Each result names its columns by a ref.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from configs.data import DataConfig
from configs.model import Model
from engines.rewards.runner import LoggedMetric, RewardCode
from engines.workers.engine import StoreSpec
from storage.batches.columns import GROUP_SIZE, LIMIT, TASK
from storage.batches.refs import BatchRef
from storage.objects.documents import Row


class RowsSpec(StoreSpec):
    """What engines that make prompts of rows have in common."""

    model: Model = Field(description="The model, for its tokenizer.")
    model_cache: str = Field(description="Directory for models that are converted or drawn.")
    data: DataConfig = Field(description="Rows and their template.")
    max_new_tokens: int = Field(description="Longest completion, in tokens.")
    group_size: int = Field(1, description="Completions of a prompt, at most.")

    def task_columns(self, rows: Sequence[Row]) -> dict[str, object]:
        """Columns of the prompts of rows [N]: their tasks, and what of its own one of these has.

        None where there is one task.
        """
        if not self.data.tasks:
            return {}
        tasks = [str(row[TASK]) for row in rows]
        settings = {
            LIMIT: (self.data.limits(self.max_new_tokens), self.max_new_tokens),
            GROUP_SIZE: (self.data.group_sizes(self.group_size), self.group_size),
        }
        return {TASK: tasks} | {
            name: np.array([own[task] for task in tasks], np.int64)
            for name, (own, most) in settings.items()
            if set(own.values()) != {most}
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsResult:
    """Rows that became prompts."""

    ref: BatchRef | None  # prompt_ids, group_id, prompt_row, row; None when all were dropped
    dropped: tuple[tuple[int, str], ...]  # (row number, reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersGiven:
    """Answers of the data as samples."""

    ref: BatchRef  # the columns of samples; row i belongs to row i // n of the prompts
    prompt_tokens: int
    truncated: int  # samples that were cut


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFailure:
    """A sample whose scoring failed."""

    sample: int  # sample_id
    function: str
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResult:
    """A scored shard."""

    ref: BatchRef  # reward, score/<function>, extra/<function>/<column>, status, reward_code
    failures: tuple[SampleFailure, ...]
    tracebacks: dict[str, str]  # of the functions' exceptions, by the failures' error
    failed: int  # samples
    metrics: dict[str, LoggedMetric]  # what the functions gave to log_metric, by its name
    code: tuple[RewardCode, ...]  # what the functions were
    seconds: float  # in the reward functions


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelScores:
    """A shard scored by reward models."""

    ref: BatchRef  # score/<function>, extra/<function>/error
    code: tuple[RewardCode, ...]  # what the models were
    seconds: float
    metrics: dict[str, LoggedMetric] = field(default_factory=dict)  # by name


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantagesResult:
    """The samples of a step that train."""

    ref: BatchRef  # the kept samples with advantages
    trained: int  # groups of which a sample is kept
    filtered_by: dict[str, int]  # groups left out by the algorithm's selection, by rule
    dropped: dict[str, int]  # groups left out for a failure, or beyond those wanted, by reason
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def filtered(self) -> int:
        """Groups left out by the algorithm's selection."""
        return sum(self.filtered_by.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class InformativeResult:
    """Which of the groups that a step has sampled so far would train."""

    groups: int  # that would, also beyond those that the step wants
    kept: BatchRef  # samples of those that train, the first ones; perhaps none


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageParts:
    """The samples of a step that train, of which parts are estimated one by one.

    Nine samples in groups of three, in two parts: edges (0, 6, 9).
    """

    samples: BatchRef  # those that train, [N]
    rows: BatchRef  # what was decided of each, [N]: shaped reward, whether its tokens count, …
    edges: tuple[int, ...]  # between which rows the parts lie; never within a group
    measured: bool  # whether estimator or corrections first need a statistic over all parts
    result: AdvantagesResult  # with the metrics of rows; its ref is `samples`

    def __len__(self) -> int:
        return len(self.edges) - 1

    def part(self, number: int) -> tuple[BatchRef, BatchRef]:
        """Samples and rows of a part, counted from 0."""
        start, stop = self.edges[number : number + 2]
        return self.samples.rows(start, stop), self.rows.rows(start, stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartResult:
    """A part of a step's samples, with its columns over response tokens."""

    ref: BatchRef  # those columns
    sums: dict[str, float]  # metrics that add up over parts, by name
    extremes: dict[str, float]  # metrics of which the largest over parts counts, by name
    metrics: dict[str, float] = field(default_factory=dict)  # of all parts; one part has them


def with_written(samples: BatchRef, written: BatchRef) -> BatchRef:
    """The batch that trains: the samples, and the columns that were written for them."""
    return samples.drop(["response_mask"]).with_columns(written)


def joined(parts: AdvantageParts, written: Sequence[PartResult]) -> AdvantagesResult:
    """The batch that trains from its parts, in their order, with the metrics over all of them."""
    sums: dict[str, float] = {}
    extremes: dict[str, float] = {}
    for part in written:
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in part.extremes.items():
            extremes[name] = max(extremes.get(name, value), value)
    metrics = _metrics(sums, extremes)
    for part in written:
        metrics |= part.metrics
    ref = with_written(parts.samples, BatchRef.concat([part.ref for part in written]))
    return replace(parts.result, ref=ref, metrics=parts.result.metrics | metrics)


def _metrics(sums: dict[str, float], extremes: dict[str, float]) -> dict[str, float]:
    """The metrics that the parts' sums and extremes (engines/data/advantage_parts.py) stand for."""
    metrics = {}
    for name, value in sums.items():
        kind, _, own = name.partition("/")
        if kind == "mean":
            count = sums[f"count/{own}"]
            metrics[own] = value / count if count else 0.0
        elif kind == "sum":
            metrics[own] = value
    metrics |= {
        name.removeprefix("max/"): value
        for name, value in extremes.items()
        if name.startswith("max/") and value != float("-inf")
    }
    if count := sums["tokens"]:
        mean = sums["advantages"] / count
        metrics |= {
            "advantage/mean": mean,
            "advantage/std": max(0.0, sums["advantages_squared"] / count - mean**2) ** 0.5,
            "advantage/max": extremes["max"],
            "advantage/min": -extremes["negative_min"],
        }
    if "returns" in sums:
        spread, rest = (
            sums[f"{name}_squared"] - sums[name] ** 2 / max(count, 1.0)
            for name in ("returns", "rest")
        )
        explained = 1 - rest / spread if count > 1 and spread > 0 else 0.0
        metrics["advantage/explained_variance"] = explained
    return metrics


class NothingToTrain(RuntimeError):
    """Scoring failed for every group of a step."""


class RewardsFailed(RuntimeError):
    """Scoring failed for some sample, and rewards.on_failure = abort."""


class TooFewGroups(RuntimeError):
    """After dynamic_sampling.max_rounds too few groups would train, and on_shortage = stop."""


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
