"""What the flow process asks of the engines that have rows, texts and scores, without a device.

Kept by engines/data/data_engine.py and environment_engine.py. Free of torch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.workers.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from configs.algorithm.algorithm import AlgorithmConfig
    from configs.data import Source
    from engines.data.results import (
        AdvantageParts,
        AdvantagesResult,
        AnswerResult,
        AnswersGiven,
        InformativeResult,
        ModelScores,
        OpponentSeats,
        PartResult,
        PromptsResult,
        ScoreResult,
    )
    from engines.rewards.protocol import TrainerState
    from engines.rewards.runner import RewardCode
    from storage.batches.refs import BatchRef


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


class EnvironmentHost(PromptMaker):
    """Has the environments of episodes: opens them, and answers what the policy says."""

    @abstractmethod
    def deal(
        self, prompts: BatchRef, n: int, out_key: str, opponent: OpponentSeats | None = None
    ) -> tuple[BatchRef, BatchRef]:
        """Prompts as rows of their players, and n samples of each before its first turn."""

    @abstractmethod
    def answer(
        self,
        samples: BatchRef,
        out_key: str,
        stage: str = "",
        source: Source | None = None,
        frames: bool = False,
        sampled_seconds: float = 0.0,
    ) -> AnswerResult:
        """Step the environments of the episodes whose turn is over, and write what they said.

        samples: as the rollout engine wrote them. stage: what they are for; sample numbers are those
        of a stage. source: of their rows, where it is not the data set. frames: whether those of the
        answers are written. sampled_seconds: that sampling the episodes' turns took so far, for their
        deadline. An environment that fails makes its sample FAILED; one that ends, or a
        limit, ends the episode, for all its players.
        """

    @abstractmethod
    def go_on(
        self,
        prompts: BatchRef,
        n: int,
        out_key: str,
        begun: BatchRef | None = None,
        turns: BatchRef | None = None,
        stage: str = "",
        source: Source | None = None,
        sampled_seconds: float = 0.0,
        group: int = 0,
        first: int = 0,
    ) -> AnswerResult:
        """Give the turns that requests waited for, and write what is asked for next, in `pending`.

        For episodes of requests (EpisodesConfig.of_requests), n of each prompt. begun: as this call
        wrote them; None: they are opened. turns: as the rollout engine wrote them, one for each row
        of `pending`; None: it is written again. Others: as in `answer`, and in Sampling.
        """

    @abstractmethod
    def gather(
        self, prompts: BatchRef, n: int, samples: Sequence[BatchRef | None], out_key: str
    ) -> BatchRef:
        """Write samples that lie apart as one batch: row i belongs to row i // n of `prompts`.

        samples: one row each, with the same columns; None: nothing of it was sampled yet.
        """
