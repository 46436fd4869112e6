"""The planner: makes the plan of a large update on a worker without device, before the ranks meet."""

from __future__ import annotations

from abc import abstractmethod

from engines.train.batching.stored_plan import PlanRequest, write_plan
from engines.workers.engine import Engine
from engines.workers.store_spec import StoreSpec
from storage.batches.refs import BatchRef


class Planner(Engine):
    """Makes plans of updates."""

    @abstractmethod
    def plan(self, request: PlanRequest, out_key: str) -> BatchRef:
        """Write the micro-batches of an update."""


class StoredPlanner(Planner):
    """Stores plans; see engines/train/batching/stored_plan.py."""

    def __init__(self, spec: StoreSpec) -> None:
        self._store = spec.open_store()

    def plan(self, request: PlanRequest, out_key: str) -> BatchRef:
        """Write the micro-batches of an update."""
        return write_plan(self._store, request, out_key)
