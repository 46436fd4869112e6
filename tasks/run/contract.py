"""What the parts of a run know of it, so that none of them imports the run (tasks/run/run.py).

Views, whose attributes are those of the same names in tasks.run.run.Run, and the record of a kind of
engines: who needs it, its client, its start. Opening, start, shutdown and calls go by these records:
`run.engines[SCORER].call(Scorer.score, …)`, which a type checker follows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from configs.cluster import Role
from configs.grpo import GRPOConfig
from engines.workers.cluster import Cluster
from engines.workers.devices import DeviceTime
from engines.workers.engine import CallId, E, EngineSpec
from engines.workers.pool import EnginePool
from storage.objects.store import Store
from storage.prompts.source import PromptSource
from storage.runs.commit_log import Commit
from storage.runs.run_store import Origin, RunStore, StageStore
from storage.runs.weights import WeightsRef
from tasks.run.attempts import Attempt, AttemptLog
from tasks.run.clock import Clock, Gate
from tasks.run.episode_driver import EpisodeDriver
from tasks.run.events import Event, Listeners, Tracking
from tasks.run.shard_driver import ShardDriver


class Attempts(Protocol):
    """Where tries are recorded (tasks/run/attempts.py)."""

    def add(self, *attempts: Attempt) -> None:
        """Record some."""


class AttemptsView(Protocol):
    """Whose calls are recorded as attempts."""

    name: str
    device_time: DeviceTime

    @property
    def attempts(self) -> Attempts:
        """Where they are recorded."""

    def tell(self, event: Event) -> None:
        """Let those hear a fact who listen."""


class Caller(AttemptsView, Protocol):
    """On whose behalf engines are started and called: a run, or what evaluates its versions later."""

    @property
    def attempts(self) -> AttemptLog:
        """By step."""

    config: GRPOConfig
    store: Store
    files: RunStore
    epoch: int
    cancelled: threading.Event


class RunView(Caller, Protocol):
    """A run; see the attributes of the same names in tasks.run.run.Run."""

    origin: Origin | None
    start: int
    source: PromptSource
    fresh: list[int]

    @property
    def head(self) -> int:
        """The last committed step."""


C = TypeVar("C")  # the client by which the flow calls a role's engines

PoolVariables: TypeAlias = Mapping[str, Mapping[str, str]]  # pool -> environment variables


class ByRole(Protocol):
    """Engines of a run or of an evaluation, called by their roles."""

    def __getitem__(self, role: EngineRole[C]) -> C:
        """The client of a role; LookupError where there is none."""

    def get(self, role: EngineRole[C]) -> C | None:
        """The same; None where there is none."""


class StartingEngines(ByRole, Protocol):
    """The engines of a run while they start (tasks/run/engines.py)."""

    run: RunView

    @property
    def cluster(self) -> Cluster:
        """The workers."""

    def wait(self, role: str) -> None:
        """Return when the engines of the role of this name stand."""


def _no_variables(config: GRPOConfig) -> PoolVariables:
    return {}


def _nothing(client: Any) -> None:
    """There is nothing to end beside the workers."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineRole(Generic[C]):
    """See the module's docstring. It is a key, as it stands."""

    name: str  # of the task that starts it, and for people
    client: Callable[[RunView, Cluster], C]  # making it builds nothing
    needed: Callable[[GRPOConfig], bool] = lambda config: True  # by a run that uses its feature
    # Builds the engines, and brings them where the run stands; None: their first call builds them.
    start: Callable[[StartingEngines, C], object] | None = None
    # Of workers that will hold them, which have to stand before these import an engine's libraries.
    variables: Callable[[GRPOConfig], PoolVariables] = _no_variables
    close: Callable[[C], object] = _nothing  # ends what is elsewhere than on the run's workers


class Clients:
    """The clients of the roles that a run, or an evaluation, has."""

    def __init__(self, clients: Mapping[EngineRole[Any], object]) -> None:
        self._clients = dict(clients)

    def __getitem__(self, role: EngineRole[C]) -> C:
        """The client of a role; LookupError where there is none."""
        if role not in self._clients:
            raise LookupError(f"There are no engines of role {role.name!r}: nothing needs them.")
        return cast("C", self._clients[role])

    def get(self, role: EngineRole[C]) -> C | None:
        """The client of a role; None where there is none."""
        return cast("C | None", self._clients.get(role))

    def close(self) -> None:
        """End what is elsewhere than on the run's workers."""
        for role, client in self._clients.items():
            role.close(client)


def pool_of(
    run: Caller,
    cluster: Cluster,
    role: Role,
    name: str,
    engine: EngineSpec[E],
    deadline: float | None = None,
    at_once: int | None = None,
) -> EnginePool[E]:
    """Engines on every worker of a role's pool, any of which takes a call; `name`: theirs there."""
    config = run.config
    return EnginePool(
        cluster,
        config.cluster.roles.pool_of(role),
        name,
        engine,
        deadline=config.rollout.deadline if deadline is None else deadline,
        start_timeout=config.cluster.start_timeout,
        cancel=run.cancelled,
        at_once=at_once,
    )


def start_pool(engines: StartingEngines, pool: EnginePool[Any]) -> None:
    """Build the engines of all workers of a pool."""
    pool.start()


class StageView(AttemptsView, Protocol):
    """Settings, engines and the place of results."""

    config: GRPOConfig
    store: Store
    episodes: EpisodeDriver

    @property
    def files(self) -> StageStore:
        """Where results of stages lie."""

    @property
    def engines(self) -> ByRole:
        """Whose calls they are."""

    def usable_weights(self, step: int) -> list[WeightsRef]:
        """Policy versions with which samples of a step may have been drawn, the current one first."""

    def call_id(self, step: int, call: str) -> CallId:
        """A call of a step."""


class StepView(StageView, Protocol):
    """A run, for those of its features that have a part in its steps."""

    clock: Clock
    shards: ShardDriver


class Closable(Protocol):
    """Engines, of which a hook needs no more."""

    def close(self) -> None:
        """End them and their workers."""


class FeatureView(RunView, Protocol):
    """A run between two steps, and after the last one."""

    flow: str
    measured: dict[str, float]
    listeners: Listeners
    tracking: Tracking

    @property
    def last(self) -> Commit | None:
        """The commit of the step before the next one."""

    @property
    def last_weights(self) -> str:
        """Address of the last policy version."""

    @property
    def engines(self) -> Closable:
        """Those of the run."""

    @property
    def gate(self) -> Gate:
        """What its steps wait for."""
