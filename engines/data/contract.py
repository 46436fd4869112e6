"""What the flow process asks of the engines that have rows, texts and scores, and what it gets.

Kept by engines/data/data_engine.py, and what makes prompts also by engines/episodes. No device is
needed here, and no torch. Each result names its columns by a ref.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from configs.algorithm.algorithm import AlgorithmConfig
from configs.data import DataConfig, Source
from configs.model import Model
from configs.rewards import RewardsConfig
from engines.rewards.runner import LoggedMetric, RewardCode
from engines.workers.engine import Engine, StoreSpec
from storage.batches.columns import GROUP_SIZE, LIMIT, TASK
from storage.batches.refs import BatchRef
from storage.objects.documents import Row

if TYPE_CHECKING:
    from engines.rewards.protocol import TrainerState


# Most tokens of each probe sequence, whose first half stands for the prompt: of several lengths, for
# what goes wrong with windows, positions and padding does so with the length.
PROBE_TOKENS = (8, 96, 16, 48, 24, 32)


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


class NothingToTrain(RuntimeError):
    """Scoring failed for every group of a step."""


class RewardsFailed(RuntimeError):
    """Scoring failed for some sample, and rewards.on_failure = abort."""


class TooFewGroups(RuntimeError):
    """After dynamic_sampling.max_rounds too few groups would train, and on_shortage = stop."""


class DataSpec(RowsSpec):
    """From what the engine is built."""

    rewards: RewardsConfig = Field(description="Reward functions.")
    run: str = Field(description="The run, below which judges' answers are kept.")
    scorers: int = Field(1, ge=1, description="Workers that score, this one included.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """A shard's completions."""

    prompts: BatchRef  # [P]
    samples: BatchRef  # [N], of these prompts
    trainer_state: TrainerState
    source: Source | None = None  # of the prompts' rows; None: the data set
    models: ModelScores | None = None  # what the reward models among the functions gave


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantagesRequest:
    """A step's scored samples, some of which are to train."""

    samples: BatchRef  # [N]
    algorithm: AlgorithmConfig
    version: int  # the policy version that trains on them
    baselines: BatchRef | None = None  # group_id and reward of the prompts' greedy completions
    left_out: BatchRef | None = None  # samples of groups that the step dropped without waiting
    repetition: BatchRef | None = None  # what `Scorer.repetition` wrote of them; None: made here
    most_groups: int | None = None  # that train, those that were drawn first; None: all
    # The samples that train, with the columns of the train engines, where those are theirs alone.
    kept: BatchRef | None = None
    # Where there are more response tokens, and the estimator allows it, they are cut into parts of
    # that size, which are then written by calls of their own.
    part_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantagePartRequest:
    """One of the parts that a step's samples were cut into."""

    parts: AdvantageParts
    number: int  # counted from 0
    algorithm: AlgorithmConfig
    version: int  # the policy version that trains on them
    statistics: BatchRef | None  # those of all parts in their order, where `parts.measured`


class PromptMaker(Engine):
    """Makes prompts of rows."""

    @abstractmethod
    def prompts(
        self, rows: list[int], first_group: int | None, out_key: str, source: Source | None = None
    ) -> PromptsResult:
        """Write the prompts of rows, of the data set or of another source with the same columns.

        Groups are numbered on from `first_group`; None: they get no numbers here.
        """


class Scorer(PromptMaker):
    """Makes prompts, rewards and advantages out of stored batches, and stores them."""

    @abstractmethod
    def row_digests(self, start: int, stop: int) -> NDArray[np.uint64]:
        """What tells the rows start … stop of the data set apart (storage/runs/seen_rows.py)."""

    @abstractmethod
    def probe(self) -> tuple[list[list[int]], list[int]]:
        """Sequences of the dataset of several lengths, and how many tokens of each are the prompt."""

    @abstractmethod
    def given(
        self, prompts: BatchRef, column: str, n: int, out_key: str, attempt: int
    ) -> AnswersGiven:
        """Write the answers that the rows of some prompts have, as n samples of each."""

    @abstractmethod
    def reward_code(self) -> dict[str, RewardCode]:
        """What the functions are that are called here, by name."""

    @abstractmethod
    def score(self, request: ScoreRequest, out_key: str) -> ScoreResult:
        """Score the completions of a shard."""

    @abstractmethod
    def advantages(
        self, request: AdvantagesRequest, out_key: str
    ) -> AdvantagesResult | AdvantageParts:
        """Choose the samples that train, and write their advantages.

        A batch without rows where selection leaves no sample. Raises RewardsFailed
        (rewards.on_failure = abort) or NothingToTrain.
        """

    @abstractmethod
    def informative(self, request: AdvantagesRequest) -> InformativeResult:
        """Which groups of a step's samples so far `advantages` would choose.

        Raises RewardsFailed (rewards.on_failure = abort).
        """

    @abstractmethod
    def repetition(self, samples: BatchRef, algorithm: AlgorithmConfig, out_key: str) -> BatchRef:
        """Write the repetition penalties of some of a step's samples."""

    @abstractmethod
    def advantage_statistics(
        self, samples: BatchRef, rows: BatchRef, algorithm: AlgorithmConfig, out_key: str
    ) -> BatchRef:
        """Write what a part adds to a statistic over the whole batch, by row."""

    @abstractmethod
    def advantage_part(self, request: AdvantagePartRequest, out_key: str) -> PartResult:
        """Write the advantages of a part."""


def join_columns(samples: BatchRef, written: BatchRef) -> BatchRef:
    """The batch that trains: the samples, and the columns that were written for them."""
    return samples.drop(["response_mask"]).with_columns(written)


def join_parts(parts: AdvantageParts, written: Sequence[PartResult]) -> AdvantagesResult:
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
    ref = join_columns(parts.samples, BatchRef.concat([part.ref for part in written]))
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
