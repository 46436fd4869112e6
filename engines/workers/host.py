"""The engine host, a Dask worker plugin that holds the worker's engines by role.

Setting it up does nothing slow, and no engine library is imported before the first build. What the
flow process has it do is in engines/workers/on_worker.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, NamedTuple, TypeVar

from distributed import Worker, WorkerPlugin
from distributed.threadpoolexecutor import ThreadPoolExecutor as DaemonThreads

from configs.imports import imported_class
from engines.failures import (
    EngineMissing,
    InfrastructureError,
    StaleCall,
    StaleIncarnation,
)
from engines.processes.parent_death import die_with_parent
from engines.processes.process_tree import kill_tree
from engines.start_progress import StartProgress, heard_by
from engines.workers.engine import Call, Engine, EngineSpec, Ranked
from engines.workers.messages import (
    BuildReport,
    CallId,
    EngineStatus,
    HostStatus,
    RunningCall,
)
from engines.workers.out_of_memory import memory_watched
from engines.workers.trace_context import span_of
from engines.workers.worker_metrics import WorkerMetrics, measured
from storage.objects.usage import COUNTER

HOST = "refrain-engine-host"  # name of the plugin on every worker
RECORDS = 512  # results remembered per worker
CONTROL_THREADS = 4
BUILD = "build"
STARTS = (BUILD, Ranked.join.__name__)  # what an engine's start is made of, bounded by its progress

Returned = TypeVar("Returned")
CallKey = tuple[str, str, str, int, int, str]  # role, method, run, epoch, step, call


@dataclass(kw_only=True, slots=True)
class HostedEngine:
    """An engine on this worker."""

    engine: Engine
    spec: EngineSpec


class Running(NamedTuple):
    """A call that is being run."""

    since: float  # monotonic clock
    role: str
    method: str
    token: str
    call: str
    progress: StartProgress


class EngineHost(WorkerPlugin):
    """Engines of one worker; see the module's docstring."""

    name = HOST
    idempotent = True  # a second flow that joins the cluster must not replace the host

    def __init__(self, env: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """`env`: environment variables by pool, where the workers were started without them."""
        self.env = env or {}

    def setup(self, worker: Worker) -> None:
        """Begin a new incarnation (called by Dask when the worker starts)."""
        self.worker = str(worker.name)
        self.address = worker.address
        self.incarnation = uuid.uuid4().hex
        self.engines: dict[str, HostedEngine] = {}
        self.epochs: dict[str, int] = {}  # newest epoch seen, by run
        self.running: dict[int, Running] = {}
        self.records: OrderedDict[CallKey, tuple[Any]] = OrderedDict()
        self.in_progress: dict[CallKey, Future[Any]] = {}
        self.lock = threading.Lock()
        # One build at a time, whatever the role: lazy modules (transformers) break when two threads
        # import from them at once.
        self.building = threading.Lock()
        self.counter = 0
        self.control = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="control")
        # A gang's calls come one after the other, in any of Dask's threads. In each of those torch
        # would have a team of OpenMP threads, and DTensor would work out anew how it is sharded. A
        # call may hang in a collective, for which no process waits when it ends.
        self.ranks = DaemonThreads(1, thread_name_prefix="rank")
        for pool in worker.state.total_resources:
            os.environ.update(self.env.get(pool, {}))
        if worker.nanny is not None:  # else this process is not ours alone
            die_with_parent()

    def build(self, role: str, spec: EngineSpec, token: str = "") -> BuildReport:
        """Make the engine of a role, unless one of the same digest stands; `token` as in `call`."""
        with self.building, self._watched(role, BUILD, token, "", None):
            hosted = self.engines.get(role)
            fresh = hosted is None or hosted.spec.digest != spec.digest
            if fresh:
                if hosted is not None:
                    self._evict(role)
                hosted = self._make(role, spec)
            return BuildReport(incarnation=self.incarnation, fresh=fresh)

    def _make(self, role: str, spec: EngineSpec) -> HostedEngine:
        cls = imported_class(spec.cls)
        if not issubclass(cls, Engine):
            raise TypeError(
                f"{spec.cls} is no engine. Derive it from engines.workers.engine.Engine."
            )
        if not issubclass(cls, spec.contract):
            raise TypeError(
                f"{spec.cls} is no {spec.contract.__name__}. Derive it from that class."
            )

        def make() -> Engine:
            with memory_watched(f"{role}.build on {self.worker}", spec.payload, lambda: cls):
                return cls(spec.payload)  # type: ignore[call-arg]

        engine = self._in_its_thread(cls, make)
        hosted = HostedEngine(engine=engine, spec=spec)
        with self.lock:
            self.engines[role] = hosted
        return hosted

    def _evict(self, role: str) -> None:
        with self.lock:
            calls = [entry for entry in self.running.values() if entry.method != BUILD]
            if busy := [entry.method for entry in calls if entry.role == role]:
                raise InfrastructureError(
                    f"worker {self.worker} cannot close its {role!r} engine while it runs {busy}"
                )
            hosted = self.engines.pop(role, None)
            for key in [key for key in self.records if key[0] == role]:
                del self.records[key]
        if hosted is not None:
            hosted.engine.close()

    def stop(self, role: str) -> bool:
        """Close the engine of a role; False when there is none."""
        with self.building:
            known = role in self.engines
            self._evict(role)
            return known

    def answer(self, call: Call[Returned], token: str, limit: float | None) -> Returned:
        """What an engine returns to a call that was sent here."""
        name = "" if call.id is None else call.id.call
        facts = {"refrain.worker": self.worker, "refrain.call": name}
        with span_of(call.trace, call.label, facts):
            value: Returned = self.call(
                call.role, call.method, call.arguments, call.id, token, limit
            )
        return value

    def call(
        self,
        role: str,
        method: str,
        kwargs: Mapping[str, Any],
        call_id: CallId | None = None,
        token: str = "",
        limit: float | None = None,
    ) -> Any:
        """Run one engine method and return what it returns.

        A call id makes the call run at most once: when it has finished, its recorded result is
        returned; while it runs, a duplicate waits for it. `token` finds this submission among the
        running calls; after `limit` seconds the worker kills itself, should nobody be left to
        enforce the caller's deadline.
        """
        hosted = self._admit(role, method, call_id)
        if call_id is None:
            with self._watched(role, method, token, "", limit):
                return self._run(hosted, role, method, kwargs)
        key = (role, method, call_id.run, call_id.epoch, call_id.step, call_id.call)
        with self.lock:
            if (record := self.records.get(key)) is not None:
                return record[0]
            running = self.in_progress.get(key)
            leads = running is None
            if running is None:
                running = self.in_progress[key] = Future()
        if not leads:
            return running.result()
        try:
            with self._watched(role, method, token, call_id.call, limit):
                value = self._run(hosted, role, method, kwargs)
        except BaseException as error:
            with self.lock:
                del self.in_progress[key]
            running.set_exception(error)
            raise
        with self.lock:
            del self.in_progress[key]
            if self.engines.get(role) is hosted:
                self.records[key] = (value,)
                while len(self.records) > RECORDS:
                    self.records.popitem(last=False)
        running.set_result(value)
        return value

    def _run(self, hosted: HostedEngine, role: str, method: str, kwargs: Mapping[str, Any]) -> Any:
        def run() -> Any:
            with memory_watched(
                f"{role}.{method} on {self.worker}", hosted.spec.payload, lambda: hosted.engine
            ):
                return methodcaller(method, **kwargs)(hosted.engine)

        return self._in_its_thread(type(hosted.engine), run)

    def _in_its_thread(self, cls: type[Engine], run: Callable[[], Returned]) -> Returned:
        """What `run` returns, in the thread in which engines of a class work; in its context here."""
        if not issubclass(cls, Ranked):
            return run()
        return self.ranks.submit(contextvars.copy_context().run, run).result()

    def _hosted(self, role: str) -> HostedEngine:
        hosted = self.engines.get(role)
        if hosted is None:
            raise EngineMissing(f"worker {self.worker} holds no engine for role {role!r}")
        return hosted

    def _admit(self, role: str, method: str, call_id: CallId | None) -> HostedEngine:
        """Refuse stale calls and unknown methods."""
        if call_id is not None:
            with self.lock:
                newest = self.epochs.setdefault(call_id.run, call_id.epoch)
                if call_id.epoch < newest:
                    raise StaleCall(
                        f"worker {self.worker} refuses epoch {call_id.epoch} of run {call_id.run}: "
                        f"a flow with epoch {newest} has taken the run over."
                    )
                self.epochs[call_id.run] = call_id.epoch
            if call_id.incarnation not in (None, self.incarnation):
                raise StaleIncarnation(
                    f"worker {self.worker} has been restarted since its {role!r} engine was built"
                )
        hosted = self._hosted(role)
        hosted.spec.check_offers(method)
        return hosted

    @contextlib.contextmanager
    def _watched(
        self, role: str, method: str, token: str, call: str, limit: float | None
    ) -> Iterator[None]:
        """List a call as running, and end this process when it overruns its limit.

        That of an engine which starts counts from its last progress.
        """
        entry = Running(time.monotonic(), role, method, token, call, StartProgress())
        with self.lock:
            self.counter += 1
            number = self.counter
            self.running[number] = entry
        over = threading.Event()
        if limit is not None:
            threading.Thread(target=_end_late, args=(entry, limit, over), daemon=True).start()
        try:
            with heard_by(entry.progress):
                yield
        finally:
            over.set()
            with self.lock:
                del self.running[number]

    def measure(self) -> WorkerMetrics:
        """What this worker measures of itself; takes milliseconds."""
        with self.lock:
            engines = {role: hosted.engine for role, hosted in self.engines.items()}
            calls = len(self.running)
        return measured(calls, {role: tuple(one.metrics()) for role, one in engines.items()})

    def status(self) -> HostStatus:
        """What this worker holds and does; quick, runs on the worker's event loop."""
        now = time.monotonic()
        with self.lock:
            return HostStatus(
                worker=self.worker,
                address=self.address,
                incarnation=self.incarnation,
                pid=os.getpid(),
                engines={
                    role: EngineStatus(
                        cls=hosted.spec.cls,
                        digest=hosted.spec.digest,
                        version=hosted.engine.version,
                    )
                    for role, hosted in self.engines.items()
                },
                running=tuple(
                    RunningCall(
                        role=entry.role,
                        method=entry.method,
                        token=entry.token,
                        call=entry.call,
                        age=now - entry.since,
                        idle=entry.progress.idle,
                        phase=entry.progress.phase,
                    )
                    for entry in self.running.values()
                ),
                traffic=COUNTER.total(),
            )


def _end_late(entry: Running, limit: float, over: threading.Event) -> None:
    """End this process when a call is not `over` in time."""
    left = limit
    while left > 0 and not over.wait(left):
        left = limit - entry.progress.idle if entry.method in STARTS else 0.0
    if not over.is_set():
        kill_tree(os.getpid())
