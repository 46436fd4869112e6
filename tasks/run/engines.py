"""The engines of a run, by role (tasks/run/roles.py): opened, started in the background, closed.

And the line that people read while a run waits for workers.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from prefect.context import TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from configs.cluster import Role
from engines.clusters.opening import open_cluster
from engines.failures import ClusterLost
from engines.train.trainer import Trainer
from engines.workers.cluster import Cluster, Say, Wait
from engines.workers.inspection import look_at_machines, running_calls, start_phases
from engines.workers.pool import Assignment, EnginePool
from engines.workers.worker_metrics import DiskSpace, SpentOfPool, SpentSince, measured_flow
from storage.objects.usage import COUNTER, Usage
from storage.tracking.machine_samples import MachineSample
from tasks.results import Metrics
from tasks.run.attempts import ATTEMPTS, backoff
from tasks.run.contract import C, Clients, EngineRole
from tasks.run.events import EngineStarted, Event, Note, WorkersAsked
from tasks.run.features import features_of
from tasks.run.machinery import Machinery, PoolState, RoleLoad, Work, WorkerLooks
from tasks.run.roles import ROLLOUT, roles_of, variables_of
from tasks.run.run_log import WORKERS, folder_of

if TYPE_CHECKING:
    from tasks.run.contract import RunView


# What workers import before their first call, and vLLM's do not.
ENGINE_MODULES = (
    "engines.train.fsdp_engine",
    "engines.rollout.hf_engine",
    "engines.data.data_engine",
    "tensordict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


class StoreUsage:
    """Requests and bytes that the flow and every worker asked of the store, since the last look.

    A worker tells its count with the result of each call. What one that died counted after its last
    call is lost.
    """

    def __init__(self) -> None:
        self._before: dict[str, Usage] = {"": COUNTER.total()}

    def since_last(self, usage: Mapping[str, Usage]) -> Metrics:
        """Metrics of a step; `usage`: what each worker process has asked since it began."""
        now = {"": COUNTER.total(), **usage}
        total = Usage()
        for process, count in now.items():
            total += count - self._before.get(process, Usage())
        self._before = now
        return {
            "store/requests": float(total.requests),
            "store/bytes_read": float(total.bytes_read),
            "store/bytes_written": float(total.bytes_written),
        }


class Opened(NamedTuple):
    """The workers, and the clients of the engines on them."""

    cluster: Cluster
    clients: Clients


class Engines:
    """Builds every role's engines in the background, and closes them with the cluster."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="engines")
        self._opened: Future[Opened] | None = None
        self._started: dict[str, Future[None]] = {}
        self._looks = WorkerLooks()
        self._usage, self._spent = StoreUsage(), SpentSince()
        self.launched = 0.0  # when workers were asked for, in seconds since 1970
        self.ended: float | None = None  # when they were told to end
        self._roles = {role.name: role for role in roles_of(run.config)}
        # Names of the roles that are started, and not by their first call.
        self.starting = [name for name, role in self._roles.items() if role.start is not None]

    def launch(self, cluster: Cluster | None = None) -> None:
        """Begin to start engines, on the workers of a cluster or on new ones; returns at once.

        All roles start at once, but for those that share devices: they start in the order of
        `engine_roles`. So do the opponent's engines, which may be beside others on their devices.
        """
        self.run.tell(WorkersAsked(starts=self.starts))
        self.launched, self.ended = time.time(), None
        self._opened = self._threads.submit(_open, self.run, list(self._roles.values()), cluster)
        settings = self.run.config.cluster
        before: dict[str, Future[None]] = {}  # by pool, the start of the role before
        for role in [name for name in self.run.config.engine_roles if name in self.starting]:
            pool = settings.roles.pool_of(role)
            in_order = settings.share_devices or role == "opponent"
            after = before.get(pool) if in_order else None
            before[pool] = self._started[role] = self._threads.submit(self._start, role, after)
        for name in self.starting:
            if name not in self._started:
                self._started[name] = self._threads.submit(self._start, name)

    def workers(self) -> dict[str, list[str]]:
        """Pool -> names of its live workers; waits for them."""
        cluster = self._made().cluster
        return {pool: sorted(cluster.workers(pool)) for pool in sorted(self.run.config.used_pools)}

    def starts(self) -> dict[str, str]:
        """Worker -> what the start of its engine is at; empty while workers start."""
        opened = self._open_now()
        return {} if opened is None else start_phases(opened.cluster)

    def at_work(self) -> Work:
        """What the engines are doing now; nothing without workers. Takes up to some seconds."""
        opened, config = self._open_now(), self.run.config
        if opened is None:
            return Work()
        trained = (*config.trained_roles, *config.frozen_roles)
        pools = sorted({config.cluster.roles.pool_of(role) for role in trained})
        try:
            calls = running_calls(opened.cluster, pools)
            tokens = opened.clients[ROLLOUT].tokens()
        except ClusterLost:  # or closed under the look, as a run is that ends
            return Work()
        return Work(
            tokens=tokens, calls=[call for of_worker in calls.values() for call in of_worker]
        )

    def look(self) -> Machinery | None:
        """How workers, queues and the store are now; None while there are no workers to ask.

        For one thread. Takes up to some seconds, where a worker does not answer. Raises as
        Cluster.ask.
        """
        opened = self._open_now()
        if opened is None:
            return None
        cluster, clients = opened
        config, store = self.run.config, self.run.store
        pools = []
        for name in sorted(config.used_pools):
            roles = [role for role in get_args(Role) if role in self._roles]
            here = tuple(role for role in roles if config.cluster.roles.pool_of(role) == name)
            target, live = config.cluster.pools[name].workers, len(cluster.workers(name))
            pools.append(PoolState(name=name, roles=here, wanted=target, live=live))
        loads = []
        for role in self._roles.values():
            client = clients[role]
            if isinstance(client, EnginePool):
                loads.append(RoleLoad(role=role.name, pool=client.pool, load=client.load()))
        disks = {"logs": DiskSpace.of(str(folder_of(self.run.name).parent))}
        if store.local_folder is not None:
            disks["store"] = DiskSpace.of(str(store.local_folder))
        return Machinery(
            pools=pools,
            loads=loads,
            workers=self._looks.look(cluster),
            flow=measured_flow(),
            disks=disks,
        )

    def machines(self) -> list[MachineSample]:
        """What the machines of the workers are doing, but for this one; none while workers start."""
        opened, here = self._open_now(), socket.gethostname()
        return [] if opened is None else look_at_machines(opened.cluster, besides=here)

    def wait(self, role: str) -> None:
        """Return when the role's engines stand; a failed start is tried again."""
        started = self._started[role]
        if started.done() and started.exception() is not None:
            started = self._started[role] = self._threads.submit(self._start, role)
        started.result()

    def _open_now(self) -> Opened | None:
        """None while workers start, and where they failed to."""
        opened = self._opened
        if opened is None or not opened.done() or opened.exception() is not None:
            return None
        return opened.result()

    def _made(self) -> Opened:
        assert self._opened is not None, "the engines were not launched"
        return self._opened.result()

    def _start(self, name: str, after: Future[None] | None = None) -> None:
        """Start a role's engines; `after`: another start that ends first, well or badly."""
        opened, role = self._made(), self._roles[name]
        if after is not None:
            after.exception()
        assert role.start is not None
        role.start(self, opened.clients[role])
        waiting = [name for name, future in self._started.items() if not future.done()]
        self.run.tell(EngineStarted(waiting=tuple(sorted(waiting))))

    def spent(self) -> dict[str, SpentOfPool]:
        """What each pool's processes and GPUs have used since the last look."""
        return self._spent.since_last(self.cluster.spent)

    @contextlib.contextmanager
    def holding(self, assignment: Assignment, *roles: Role) -> Iterator[None]:
        """During the body an attempt has all workers of the roles' pools, as calls of gangs do."""
        cluster = self.run.config.cluster
        with contextlib.ExitStack() as stack:
            for pool in {cluster.roles.pool_of(role) for role in roles}:
                live = self.cluster.known_workers(pool)
                names = live or [f"{pool}-{n}" for n in range(cluster.pools[pool].workers)]
                stack.enter_context(assignment.time.held(pool, names, assignment.held))
            yield

    def metrics(self) -> Metrics:
        """Since the last look: of the store, of turns on shared devices, of the features' engines."""
        metrics = self._usage.since_last(self.cluster.usage) | self.cluster.devices.metrics()
        for feature in features_of(self.run.config):
            metrics |= feature.metrics(self.clients)
        return metrics

    @property
    def cluster(self) -> Cluster:
        """The workers."""
        return self._made().cluster

    @property
    def clients(self) -> Clients:
        """By role."""
        return self._made().clients

    def __getitem__(self, role: EngineRole[C]) -> C:
        """The client of a role; LookupError where the run has none."""
        return self.clients[role]

    def get(self, role: EngineRole[C]) -> C | None:
        """The client of a role; None where the run has none."""
        return self.clients.get(role)

    @property
    def trained(self) -> list[Trainer]:
        """What has a state to store; the policy last."""
        return [self[self._roles[name]] for name in reversed(self.run.config.trained_roles)]

    def hand_over(self) -> Cluster:
        """The workers with their engines, for another run; this one has none from now on.

        Only while no call is under way.
        """
        opened, self._opened = self._made(), None
        self._threads.shutdown(wait=True)
        opened.clients.close()
        return opened.cluster

    def close(self) -> None:
        """End every engine and worker."""
        self.ended = self.ended or time.time()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._opened is not None:
            # Not cancelled by now means opening or open: wait for it, so that nothing is left.
            with contextlib.suppress(Exception, CancelledError):
                opened = self._opened.result()
                opened.cluster.close()
                opened.clients.close()


def _open(run: RunView, roles: list[EngineRole[Any]], cluster: Cluster | None) -> Opened:
    """Open the cluster, unless one is given, and make the clients of the roles."""
    config = run.config
    if cluster is None:
        used = config.used_pools
        pools = {name: pool for name, pool in config.cluster.pools.items() if name in used}
        cluster = open_cluster(
            config.cluster.model_copy(update={"pools": pools}),
            variables_of(config),
            cancel=run.cancelled,
            preload=ENGINE_MODULES,
            output=folder_of(run.name) / WORKERS,
            say=outage_lines(run.tell),
        )
    else:  # of the run that this one goes on with
        cluster.outages.say = outage_lines(run.tell)
    return Opened(cluster, Clients({role: role.client(run, cluster) for role in roles}))


def outage_lines(tell: Callable[[Event], object]) -> Say:
    """Tells a wait on the terminal, by `tell`, and in the log of the task that waits."""

    def say(wait: Wait) -> None:
        context = TaskRunContext.get()
        tries = 1 if context is None else ATTEMPTS - context.task_run.run_count + 1
        line = sentence(wait, tries)
        tell(Note(text=line, warning=True))
        with contextlib.suppress(MissingContextError):
            get_run_logger().warning("%s", line)

    return say


def sentence(wait: Wait, tries: int = 1) -> str:
    """What is waited for, since when and until when; `tries`: of the task, this one included."""
    until = wait.until + sum(
        wait.limit + backoff(ATTEMPTS - rest) for rest in range(tries - 1, 0, -1)
    )
    cause = f" ({wait.cause})" if wait.cause else ""
    return (
        f"{wait.pool}: {wait.there} of {wait.needed} workers since {_clock(wait.since)}, gives up "
        f"at {_clock(until)}{cause}"
    )


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))
