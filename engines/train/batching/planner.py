"""The planner: makes the plan of a large update on a worker without device, before the ranks meet."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from configs.base import Settings
from engines.train.batching.mfu import CostModel
from engines.train.batching.stored_plan import write_plan
from engines.workers.engine import Engine
from storage.batches.refs import BatchRef
from storage.objects.store import Store


class PlannerSpec(Settings):
    """From what the planner is built."""

    store_uri: str = Field(description="Store of batches.")
    store_options: dict[str, str | int | float | bool] = Field(description="Its arguments.")


class Planner(Engine):
    """Stores plans; see engines/train/batching/stored_plan.py."""

    REMOTE: ClassVar[tuple[str, ...]] = ("plan",)

    def __init__(self, spec: PlannerSpec) -> None:
        self._store = Store(spec.store_uri, spec.store_options)

    def plan(
        self,
        batch: BatchRef,
        world: int,
        budget: int,
        mini_batches: int,
        cost: CostModel,
        out_key: str,
        tree_training: bool = False,
    ) -> BatchRef:
        """Write the micro-batches of an update; reads tokens for tree training only."""
        return write_plan(
            self._store,
            batch,
            world=world,
            budget=budget,
            mini_batches=mini_batches,
            cost=cost,
            out_key=out_key,
            tree_training=tree_training,
        )

    def close(self) -> None:
        """There is nothing to end."""
