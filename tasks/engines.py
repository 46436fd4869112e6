"""The engines of a run: which roles it needs, on which pools, and how they are started."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.train import TrainConfig
from engines.cluster import Cluster, open_cluster
from engines.gang import Gang
from engines.pool import EnginePool
from engines.remote import EngineSpec
from engines.rollout import RolloutSpec, engine_class, worker_environment
from engines.rollout_pool import RolloutPool
from engines.scoring import ScoringSpec
from engines.train_spec import TrainSpec
from engines.trainer import Trainer

if TYPE_CHECKING:
    from tasks.run import Run

MODELS = Path(".refrain/models")


class Engines:
    """Builds every role's engines in the background, and closes them with the cluster."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="engines")
        self._cluster: Future[Cluster] | None = None
        self._started: dict[str, Future[Any]] = {}
        self.roles = ["reward", "actor", "rollout"] + (["ref"] if run.needs_ref else [])

    def launch(self) -> None:
        """Begin to start workers and engines; returns at once."""
        self._cluster = self._threads.submit(self._open)
        for role in self.roles:
            self._started[role] = self._threads.submit(self._start, role)

    @property
    def cluster(self) -> Cluster:
        """The workers; waits for them."""
        assert self._cluster is not None
        return self._cluster.result()

    def workers(self) -> dict[str, list[str]]:
        """Pool -> names of its live workers; waits for them."""
        pools = sorted({pool for _, pool in self._run.config.cluster.roles})
        return {pool: sorted(self.cluster.workers(pool)) for pool in pools}

    def wait(self, role: str) -> None:
        """Return when the role's engines stand; a failed start is tried again."""
        started = self._started[role]
        if started.done() and started.exception() is not None:
            started = self._started[role] = self._threads.submit(self._start, role)
        started.result()
