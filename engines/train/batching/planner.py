"""The planner: makes the plan of a large update on a worker without device, before the ranks meet."""

from __future__ import annotations

from abc import abstractmethod

from engines.train.batching.mfu import CostModel
from engines.train.batching.stored_plan import write_plan
from engines.workers.engine import Engine
from engines.workers.store_spec import StoreSpec
from storage.batches.refs import BatchRef


class Planner(Engine):
    """Makes plans of updates."""

    @abstractmethod
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


class StoredPlanner(Planner):
    """Stores plans; see engines/train/batching/stored_plan.py."""

    def __init__(self, spec: StoreSpec) -> None:
        self._store = spec.open_store()

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
        """Write the micro-batches of an update."""
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
