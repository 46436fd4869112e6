"""What the flow process asks of the engine that has trees of completions grow. Free of torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from pydantic import Field

from configs.model import Model
from configs.tree import TreeSettings
from engines.workers.engine import Engine, StoreSpec
from storage.batches.refs import BatchRef


class TreeSpec(StoreSpec):
    """From what the engine is built."""

    model: Model = Field(description="The model, for its tokenizer.")
    model_cache: str = Field(description="Directory for models that are converted or drawn.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What says how the trees of a shard grow."""

    tree: TreeSettings
    n: int  # leaves of each
    seed: int | None  # rollout.seed
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GrownTrees:
    """The trees of a shard's prompts, and what is sampled next."""

    nodes: BatchRef | None  # a row for each segment so far; None before the first
    asked: BatchRef | None = None  # rows to go on with; None: the trees have all of their leaves
    samples: BatchRef | None = None  # then: group_size samples of each prompt
    truncated: int = 0  # of the samples


class TreeGrower(Engine):
    """Has trees of completions grow."""

    @abstractmethod
    def grow(
        self,
        prompts: BatchRef,
        growth: Growth,
        out_key: str,
        before: GrownTrees | None = None,
        level: BatchRef | None = None,
    ) -> GrownTrees:
        """Take up a level of the trees of some prompts, and say what is sampled next.

        before: what was said of the level before; None: there is no tree yet. level: what a rollout
        engine made of `before.asked`, [B].
        """
