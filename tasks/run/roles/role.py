"""A kind of engines that a run may have, as one record: who needs it, its client, and its start.

The table of all is tasks/run/role_table.py. Opening, start, shutdown and calls go by these records:
`run.engines[SCORER].call(Scorer.score, …)`, which a type checker follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast

from configs.cluster import Role
from configs.grpo import GRPOConfig
from engines.workers.cluster import Cluster
from engines.workers.engine import E, EngineSpec
from engines.workers.pool import EnginePool

if TYPE_CHECKING:
    from tasks.run.run_view import Caller, RunView

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
