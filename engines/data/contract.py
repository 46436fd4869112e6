"""What the flow process asks of the engines that have rows, texts and scores, without a device.

Kept by engines/data/data_engine.py, environment_engine.py and reward_model_engine.py. Free of torch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from engines.workers.engine import Engine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from configs.algorithm.algorithm import AlgorithmConfig
    from configs.data import QuarantineConfig, Source
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
        RowHistoryResult,
        ScoreResult,
    )
    from engines.rewards.protocol import TrainerState
    from engines.rewards.runner import RewardCode
    from storage.batches.refs import BatchRef


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
    def score(
        self,
        prompts: BatchRef,
        samples: BatchRef,
        out_key: str,
        trainer_state: TrainerState,
        models: ModelScores | None = None,
        source: Source | None = None,
    ) -> ScoreResult:
        """Score the completions of a shard; row i of samples belongs to row i // n of prompts.

        models: what the reward models among the functions gave. source: of the prompts; None: the
        data set.
        """

    @abstractmethod
    def advantages(
        self,
        samples: BatchRef,
        algorithm: AlgorithmConfig,
        out_key: str,
        version: int,
        baselines: BatchRef | None = None,
        left_out: BatchRef | None = None,
        repetition: BatchRef | None = None,
        part_tokens: int | None = None,
        most_groups: int | None = None,
        kept: BatchRef | None = None,
    ) -> AdvantagesResult | AdvantageParts:
        """Choose the samples that train, and write their advantages.

        version: the policy version that trains on them. baselines: scored greedy completions of the
        prompts. left_out: samples of groups that the step did not wait for and dropped. repetition:
        what `repetition` wrote of all samples. part_tokens: where there are more response tokens,
        and the estimator allows it, they are cut into parts of that size, which are then written by
        calls of their own. most_groups: that train. kept: the samples that train, with the columns
        of the train engines, where those were made for them alone.

        A batch without rows where selection leaves no sample. Raises RewardsFailed
        (rewards.on_failure = abort) or NothingToTrain.
        """

    @abstractmethod
    def informative(
        self,
        samples: BatchRef,
        algorithm: AlgorithmConfig,
        most_groups: int,
        repetition: BatchRef | None = None,
    ) -> InformativeResult:
        """Which groups of a step's samples so far `advantages` would choose, most_groups of them.

        repetition: as there. Raises RewardsFailed (rewards.on_failure = abort).
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
    def advantage_part(
        self,
        parts: AdvantageParts,
        number: int,
        statistics: BatchRef | None,
        algorithm: AlgorithmConfig,
        out_key: str,
        version: int,
    ) -> PartResult:
        """Write the advantages of a part, counted from 0; `statistics` are those of all parts."""

    @abstractmethod
    def row_history(
        self,
        before: BatchRef | None,
        prompts: BatchRef,
        samples: BatchRef,
        step: int,
        quarantine: QuarantineConfig | None,
        readmitted: list[int] | None,
        out_key: str,
    ) -> RowHistoryResult:
        """Write what became of each row of the data, after one more step.

        before: the same before the step. prompts: of the step, of which `samples` are the scored
        samples. readmitted: rows that are let in again; None: all.
        """


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
    ) -> AnswerResult:
        """Step the environments of the episodes whose turn is over, and write what they said.

        samples: as the rollout engine wrote them. stage: what they are for; sample numbers are those
        of a stage. source: of their rows, where it is not the data set. frames: whether those of the
        answers are written. An environment that fails makes its sample FAILED; one that ends, or a
        limit, ends the episode, for all its players.
        """


class RewardModels(Engine):
    """Holds reward models and judges."""

    @abstractmethod
    def score(self, prompts: BatchRef, samples: BatchRef, out_key: str) -> ModelScores:
        """Score the completions of a shard; row i of samples belongs to row i // n of prompts.

        Writes score/<function>, NaN where there is none, and extra/<function>/error, which says why.
        """
