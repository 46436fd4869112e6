"""What a run works with, at one look: its pools, their queues, and what workers say of themselves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engines.workers import host
from engines.workers.cluster import Cluster
from engines.workers.engine import RunningCall
from engines.workers.pool import PoolLoad
from engines.workers.worker_metrics import DiskSpace, WorkerMetrics

ASKED_AT_ONCE = 32  # workers of a look; with more of them the others are asked at the next ones
PATIENCE = 5.0  # seconds that a worker has to answer


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolState:
    """A pool of workers."""

    name: str
    roles: tuple[str, ...]  # that live on it
    wanted: int  # workers that the settings ask for
    live: int  # workers that there are


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleLoad:
    """The calls of a role whose engines take one each."""

    role: str
    pool: str
    load: PoolLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What engines are doing at one look."""

    tokens: Mapping[str, int] = field(default_factory=dict)  # rollout worker -> drawn so far
    calls: Sequence[RunningCall] = ()  # of engines that train or give log-probs


@dataclass(frozen=True, kw_only=True, slots=True)
class Machinery:
    """See the module's docstring."""

    pools: Sequence[PoolState]
    loads: Sequence[RoleLoad]
    workers: Mapping[str, tuple[str, WorkerMetrics]]  # live ones by name: pool, the last answer
    flow: WorkerMetrics  # of the flow's own process
    disks: Mapping[str, DiskSpace]  # of the flow's machine, by what is there: store, logs


class WorkerLooks:
    """The last answer of each worker, for one thread that asks."""

    def __init__(self) -> None:
        self._answers: dict[str, WorkerMetrics] = {}  # by address
        self._looks = 0

    def look(self, cluster: Cluster) -> dict[str, tuple[str, WorkerMetrics]]:
        """Ask some of the workers, in turn; one that does not answer keeps its last answer."""
        members = cluster.members()
        addresses = [member.address for member in members.values()]
        first = self._looks * ASKED_AT_ONCE % max(1, len(addresses))
        self._looks += 1
        around = itertools.islice(itertools.cycle(addresses), first, first + len(addresses))
        turn = itertools.islice(around, ASKED_AT_ONCE)
        self._answers |= cluster.ask_each(host.measure, turn, PATIENCE)
        self._answers = {
            address: self._answers[address] for address in addresses if address in self._answers
        }
        return {
            name: (member.pool, self._answers[member.address])
            for name, member in members.items()
            if member.address in self._answers
        }
