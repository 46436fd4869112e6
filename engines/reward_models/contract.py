"""What the flow process asks of the engines that hold reward models and judges. Free of torch."""

from __future__ import annotations

from abc import abstractmethod

from pydantic import Field

from configs.rewards import LocalJudgeReward, RewardModelReward
from engines.data.contract import ModelScores, RowsSpec
from engines.workers.engine import Engine
from storage.batches.refs import BatchRef


class RewardModelSpec(RowsSpec):
    """From what the engine is built; the model is the policy's, for its tokenizer."""

    reward_models: tuple[RewardModelReward, ...] = Field(description="The reward models.")
    judges: tuple[LocalJudgeReward, ...] = Field((), description="The judges.")
    run: str = Field("", description="The run, below which judges' answers and weights are kept.")


class RewardModels(Engine):
    """Holds reward models and judges."""

    @abstractmethod
    def score(self, prompts: BatchRef, samples: BatchRef, out_key: str) -> ModelScores:
        """Score the completions of a shard, of these prompts.

        Writes score/<function>, NaN where there is none, and extra/<function>/error, which says why.
        """
