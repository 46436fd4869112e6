"""What the flow process asks of the engine that has trees of completions grow. Free of torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from pydantic import Field

from configs.model import Model
from engines.workers.engine import Engine
from engines.workers.store_spec import StoreSpec

if TYPE_CHECKING:
    from engines.data.results import GrownTrees, Growth
    from storage.batches.refs import BatchRef


class TreeSpec(StoreSpec):
    """From what the engine is built."""

    model: Model = Field(description="The model, for its tokenizer.")
    model_cache: str = Field(description="Directory for models that are converted or drawn.")


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
