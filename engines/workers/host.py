"""The engine host: a Dask worker plugin that holds the worker's engines by role.

Setting it up does nothing slow. Engines are built and called through the functions of
engines/workers/on_worker.py. No engine library is imported before the first build.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import os
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, NamedTuple

from distributed import Worker, WorkerPlugin

from engines.failures import (
    EngineMissing,
    InfrastructureError,
    StaleCall,
    StaleIncarnation,
    StaleVersion,
)
from engines.imports import imported_class
from engines.processes.parent_death import die_with_parent, kill_tree
from engines.workers.engine import COLLECTORS, Call, Engine, EngineSpec, calls_of
from engines.workers.messages import (
    BuildReport,
    CallId,
    EngineStatus,
    HostStatus,
    Outcome,
    RunningCall,
    Ticket,
)
from storage.objects.usage import COUNTER

HOST = "refrain-engine-host"  # name of the plugin on every worker
RECORDS = 512  # results remembered per worker
CONTROL_THREADS = 4
PLAIN = Ticket()

CallKey = tuple[str, str, str, int, int, str]  # role, method, run, epoch, step, call


@dataclass(kw_only=True, slots=True)
class Tenant:
    """An engine on this worker."""

    engine: Engine
    spec: EngineSpec
    calls: dict[str, Call]
    seconds: float  # the building took


class Running(NamedTuple):
    """A call that is being run."""

    since: float  # monotonic clock
    role: str
    method: str
    token: str
    call: str


class EngineHost(WorkerPlugin):
    """Engines of one worker; see the module's docstring."""

    name = HOST
    idempotent = True  # a second flow that joins the cluster must not replace the host

    def __init__(
        self, env: Mapping[str, Mapping[str, str]] | None = None, logs: str | None = None
    ) -> None:
        """`env`: environment variables by pool, where the workers were started without them;
        `logs`: directory for a file with what each worker and its children print.
        """
        self.env = env or {}
        self.logs = logs

    def setup(self, worker: Worker) -> None:
        """Begin a new incarnation (called by Dask when the worker starts)."""
        self.worker = str(worker.name)
        self.address = worker.address
        self.incarnation = uuid.uuid4().hex
        self.tenants: dict[str, Tenant] = {}
        self.epochs: dict[str, int] = {}  # newest epoch seen, by run
        self.running: dict[int, Running] = {}
        self.records: OrderedDict[CallKey, Outcome] = OrderedDict()
        self.in_progress: dict[CallKey, Future[Outcome]] = {}
        self.lock = threading.Lock()
        # One build at a time, whatever the role: lazy modules (transformers) break when two threads
        # import from them at once.
        self.building = threading.Lock()
        self.counter = 0
        self.control = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="control")
        for pool in worker.state.total_resources:
            os.environ.update(self.env.get(pool, {}))
        if worker.nanny is not None:  # else this process is not ours alone
            die_with_parent()
            if self.logs is not None:
                _print_to(f"{self.logs}/{self.worker}.log")

    def build(self, role: str, spec: EngineSpec) -> BuildReport:
        """Make the engine of a role, unless one of the same digest stands; closes any other."""
        with self.building:
            tenant = self.tenants.get(role)
            fresh = tenant is None or tenant.spec.digest != spec.digest
            if fresh:
                if tenant is not None:
                    self._evict(role)
                tenant = self._make(role, spec)
            assert tenant is not None
            return BuildReport(
                role=role,
                worker=self.worker,
                incarnation=self.incarnation,
                digest=spec.digest,
                fresh=fresh,
                seconds=tenant.seconds,
                calls=tenant.calls,
            )

    def _make(self, role: str, spec: EngineSpec) -> Tenant:
        began = time.monotonic()
        cls = imported_class(spec.cls)
        if not issubclass(cls, Engine):
            raise TypeError(
                f"{spec.cls} is no engine. Derive it from engines.workers.engine.Engine."
            )
        engine = cls(spec.payload)  # type: ignore[call-arg]
        tenant = Tenant(
            engine=engine, spec=spec, calls=calls_of(cls), seconds=time.monotonic() - began
        )
        with self.lock:
            self.tenants[role] = tenant
        return tenant

    def _evict(self, role: str) -> None:
        with self.lock:
            if busy := [entry.method for entry in self.running.values() if entry.role == role]:
                raise InfrastructureError(
                    f"worker {self.worker} cannot close its {role!r} engine while it runs {busy}"
                )
            tenant = self.tenants.pop(role, None)
            for key in [key for key in self.records if key[0] == role]:
                del self.records[key]
        if tenant is not None:
            tenant.engine.close()

    def stop(self, role: str) -> bool:
        """Close the engine of a role; False when there is none."""
        with self.building:
            known = role in self.tenants
            self._evict(role)
            return known

    def call(
        self,
        role: str,
        method: str,
        kwargs: Mapping[str, Any],
        call_id: CallId | None = None,
        ticket: Ticket = PLAIN,
    ) -> Outcome:
        """Run one engine method.

        A call id makes the call run at most once: when it has finished, its recorded result is
        returned; while it runs, a duplicate waits for it.
        """
        tenant = self._admit(role, method, call_id)
        if call_id is None:
            return self._run(tenant, role, method, kwargs, "", ticket)
        key = (role, method, call_id.run, call_id.epoch, call_id.step, call_id.call)
        with self.lock:
            if (record := self.records.get(key)) is not None:
                return record
            running = self.in_progress.get(key)
            leads = running is None
            if running is None:
                running = self.in_progress[key] = Future()
        if not leads:
            return running.result()
        try:
            outcome = self._run(tenant, role, method, kwargs, call_id.call, ticket)
        except BaseException as error:
            with self.lock:
                del self.in_progress[key]
            running.set_exception(error)
            raise
        with self.lock:
            del self.in_progress[key]
            if self.tenants.get(role) is tenant:
                self.records[key] = dataclasses.replace(outcome, repeated=True)
                while len(self.records) > RECORDS:
                    self.records.popitem(last=False)
        running.set_result(outcome)
        return outcome

    def collect(self, role: str, collector: str, method: str, parts: list[Any]) -> Outcome:
        """Join the results of all ranks."""
        tenant = self.tenants.get(role)
        if tenant is None:
            raise EngineMissing(f"worker {self.worker} holds no engine for role {role!r}")
        return Outcome(value=methodcaller(collector, method, parts)(tenant.engine))

    def _admit(self, role: str, method: str, call_id: CallId | None) -> Tenant:
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
        tenant = self.tenants.get(role)
        if tenant is None:
            raise EngineMissing(f"worker {self.worker} holds no engine for role {role!r}")
        if method not in tenant.calls:
            raise ValueError(
                f"{tenant.spec.cls} offers no {method!r}. Its REMOTE table has "
                f"{sorted(tenant.calls)}."
            )
        version = tenant.engine.version
        if call_id is not None and call_id.version not in (None, version):
            raise StaleVersion(
                f"the {role!r} engine of worker {self.worker} holds policy version {version}, "
                f"but the call needs version {call_id.version}"
            )
        return tenant

    def _run(
        self,
        tenant: Tenant,
        role: str,
        method: str,
        kwargs: Mapping[str, Any],
        call: str,
        ticket: Ticket,
    ) -> Outcome:
        began = time.monotonic()
        with self._watched(Running(began, role, method, ticket.token, call), ticket.limit):
            value = methodcaller(method, **kwargs)(tenant.engine)
            collect = tenant.calls[method].collect
            if ticket.alone and collect in COLLECTORS:
                value = methodcaller(collect, method, [value])(tenant.engine)
        return Outcome(value=value, seconds=time.monotonic() - began)

    @contextlib.contextmanager
    def _watched(self, entry: Running, limit: float | None) -> Iterator[None]:
        """List a call as running, and end this process when it overruns its limit."""
        with self.lock:
            self.counter += 1
            number = self.counter
            self.running[number] = entry
        alarm = threading.Timer(limit, kill_tree, [os.getpid()]) if limit is not None else None
        if alarm is not None:
            alarm.daemon = True
            alarm.start()
        try:
            yield
        finally:
            if alarm is not None:
                alarm.cancel()
            with self.lock:
                del self.running[number]

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
                        cls=tenant.spec.cls,
                        digest=tenant.spec.digest,
                        version=tenant.engine.version,
                    )
                    for role, tenant in self.tenants.items()
                },
                running=tuple(
                    RunningCall(
                        role=entry.role,
                        method=entry.method,
                        token=entry.token,
                        call=entry.call,
                        age=now - entry.since,
                    )
                    for entry in self.running.values()
                ),
                traffic=COUNTER.total(),
            )


def _print_to(path: str) -> None:
    """Append what this process and its children print, crash reports included, to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # nothing is flushed when we are killed
    faulthandler.enable()
