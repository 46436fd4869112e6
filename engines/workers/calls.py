"""Calls on engines from the flow process: submit, wait, and turn what goes wrong into an error.

Waiting is done in the calling thread. A cancel event, a lost worker, a deadline and a lost
scheduler all end it: transport.CallWatch looks for them. What every engine of a pool does at once
goes as one message (`submit_to_all`): a call as a Dask task costs the flow's client more than a
millisecond and the scheduler nearly two, a worker in a broadcast less than a tenth and a fifth of
that.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from distributed.client import ClosedClientError
from distributed.scheduler import KilledWorker, NoValidWorkerError

from engines.failures import CallDeadline, InfrastructureError, NoProgress, WorkerLost, revive
from engines.workers import host
from engines.workers.cluster import Cluster, raise_if_set
from engines.workers.engine import BuildReport, Call, CallResult, Engine, EngineSpec, HostStatus
from engines.workers.host import BUILD, STARTS
from engines.workers.transport import SLICE, Outgoing

if TYPE_CHECKING:
    from tornado.platform.asyncio import BaseAsyncIOLoop

R = TypeVar("R")  # what a call returns
GRACE = 30.0  # seconds after the deadline at which a worker without a flow process ends itself
FETCH = 30.0  # seconds that fetching a finished call's result may take
LOOK = 1.0  # seconds between looks at the worker meanwhile
STATUS = 3.0  # seconds in which a healthy worker reports its status
STOP = 30.0  # seconds in which an engine closes


class PendingCall(Generic[R]):
    """A call on its way; wait for it, or drop it."""

    def __init__(
        self,
        cluster: Cluster,
        address: str,
        label: str,
        function: Callable[..., CallResult[R] | None],
        *args: object,
        token: str = "",
        slot: bool = True,
        wake: threading.Event | None = None,
        starts: bool = False,
        pushed: bool = False,
    ) -> None:
        """Submit `function(*args)` to the worker at `address`; `label` names it for people.

        `slot`: whether it takes one of the worker's slots. `wake`: set when the call ends, for a
        caller that waits for several. `starts`: it is part of an engine's start, whose deadline
        counts from its last progress. `pushed`: the worker pushes the result, under `token`.
        """
        pool = cluster.pool_of(address)
        self.cluster, self.pool = cluster, pool or ""
        self.address = address
        self.worker = cluster.table.name_of(address)
        self.label = label
        self.token = token
        self._starts, self._pushed = starts, pushed
        self.began = time.monotonic()
        if pool is None:
            raise WorkerLost(self.worker, f"there is no worker at {address} any more")
        self.done = threading.Event()
        self.attention = threading.Event()  # the call has ended, or must be looked at
        self._cancel: threading.Event | None = None
        self._until = math.inf  # when the watch has the deadline looked at
        self._extended = 0.0  # since it had not begun, or queued
        if pushed:
            cluster.pushed.expect(token, lambda: self._wake(wake))
        self._task = Outgoing(
            function=function,
            args=args,
            key=f"{label}-{token or uuid.uuid4().hex}",
            address=address,
            resources={pool: 1} if slot else {},
            settled=lambda: self._sent(wake),
        )
        try:
            cluster.sender.send(self._task)
        except ClosedClientError as error:  # the run is being ended, or the scheduler has gone
            raise cluster.why_lost(f"{label} could not be sent ({error})") from error

    def wait(self, deadline: float, cancel: threading.Event | None = None) -> CallResult[R]:
        """The function's result, or the error that fits what happened.

        `deadline` (seconds) counts from when the worker begins the call, not while it queues.
        """
        self._cancel, self._until = cancel, self.began + deadline
        try:
            with self.cluster.watch.over(self):
                while not self.ended(deadline):
                    raise_if_set(cancel)
                    self.attention.wait()
                    self.attention.clear()
            return self.result()
        finally:
            self.drop()

    def overdue(self, now: float) -> bool:
        """Whether its deadline is over, or it has been cancelled."""
        return now >= self._until or (self._cancel is not None and self._cancel.is_set())

    def ended_unheard(self) -> bool:
        """Whether it has ended, with or without a result that was pushed."""
        future = self._task.future
        return future is not None and bool(future.done())

    def ended(self, deadline: float) -> bool:
        """Whether the call has ended; raises when it never will, or not in time."""
        if self._is_done():
            return True
        self.cluster.check()
        if self.cluster.pool_of(self.address) is None and not self._is_done():
            raise self._lost(self.cluster.why_gone(self.address))
        now = time.monotonic()
        if now >= max(self.began + deadline, self._extended):
            self._extended = self._until = now + self._overtime(deadline)
        return False

    def _is_done(self) -> bool:
        return self.done.is_set() or self.ended_unheard()

    def _sent(self, wake: threading.Event | None) -> None:
        if self._task.future is None:
            self._wake(wake)
        elif not self._pushed:  # a callback is a task and a thread's work: more than the push
            self._task.future.add_done_callback(lambda _: self._wake(wake))

    def _wake(self, wake: threading.Event | None) -> None:
        self.done.set()
        self.attention.set()
        if wake is not None:
            wake.set()

    def drop(self) -> None:
        """Forget the call: Dask cancels it if it has not begun, and frees its result."""
        if self._pushed:
            self.cluster.pushed.forget(self.token)
        self.cluster.sender.drop(self._task)

    def _overtime(self, deadline: float) -> float:
        """Seconds still due to a call that queued; CallDeadline, and a killed worker, if none."""
        phase = "it does not answer"
        with contextlib.suppress(TimeoutError):
            calls = {
                call.token: call
                for call in status_of(self.cluster, self.address, timeout=STATUS).running
            }
            if calls and self.token not in calls:
                return 1.0  # queued behind calls that have deadlines of their own
            if (call := calls.get(self.token)) is not None:
                phase, spent = call.phase, call.idle if self._starts else call.age
                if spent < deadline:
                    return deadline - spent
        if self._is_done():
            return 1.0
        self.cluster.kill([self.address])
        if self._starts:
            raise NoProgress(self.worker, deadline, self.label, phase)
        raise CallDeadline(self.worker, deadline, self.label)

    def result(self) -> CallResult[R]:
        """What the function returned, once the call has ended."""
        unsent = self._task.error
        if isinstance(unsent, ClosedClientError):
            raise self.cluster.why_lost(f"{self.label} could not be sent ({unsent})") from unsent
        if unsent is not None:
            raise unsent
        try:
            result = self._fetch()
        except KilledWorker:
            raise self._lost(self.cluster.why_gone(self.address)) from None
        except NoValidWorkerError:
            raise self._lost("it left before the call began") from None
        except CancelledError:
            raise self.cluster.why_lost(f"the Dask scheduler dropped {self.label}") from None
        self.cluster.count(self.pool, result)
        return result

    def _fetch(self) -> CallResult[R]:
        """The result from the worker that holds it; it may die with it.

        Dask's client fetches for several callers in one request. Who gives up waiting in its loop,
        as Future.result(timeout) does, cancels that for all of them; so the wait is bounded here.
        """
        result: CallResult[R] | None
        if self._pushed and (result := self.cluster.pushed.take(self.token)) is not None:
            return result
        future, until = self._task.future, time.monotonic() + FETCH
        assert future is not None, "a call that has ended was sent"
        loop = cast("BaseAsyncIOLoop", self.cluster.client.loop).asyncio_loop
        fetch = asyncio.run_coroutine_threadsafe(future._result(), loop)
        while True:
            try:
                result = fetch.result(timeout=LOOK)
            except TimeoutError:
                self.cluster.check()
                is_gone = self.cluster.pool_of(self.address) is None
                if is_gone or time.monotonic() >= until:
                    why = self.cluster.why_gone(self.address)
                    raise self._lost(f"{why} before the result was fetched") from None
            except OSError as error:  # the result comes by way of the scheduler
                self.cluster.check()
                raise self.cluster.why_lost(
                    f"the Dask scheduler cannot be reached: {error}"
                ) from error
            else:
                if result is None:
                    raise self._lost("the result that it pushed has not arrived")
                return result

    def _lost(self, cause: str) -> WorkerLost:
        seconds = time.monotonic() - self.began
        hint = self.cluster.log_hint(self.worker)
        return WorkerLost(
            self.worker, f"{cause}; {self.label} was under way for {seconds:.1f} s{hint}"
        )


def value_of(result: CallResult[R], where: str) -> R:
    """What a call returned; raises what it raised."""
    if result.failure is not None:
        raise revive(result.failure, where)
    return cast("R", result.value)


def build(
    cluster: Cluster,
    address: str,
    role: str,
    spec: EngineSpec[Engine],
    *,
    deadline: float,
    cancel: threading.Event | None = None,
) -> BuildReport:
    """Build the engine of a role on a worker, unless the same one stands there already."""
    pending = start_build(cluster, address, role, spec)
    return value_of(pending.wait(deadline, cancel), f"building {role} on {pending.worker}")


def start_build(
    cluster: Cluster,
    address: str,
    role: str,
    spec: EngineSpec[Engine],
    wake: threading.Event | None = None,
) -> PendingCall[BuildReport]:
    """Begin `build`."""
    token = uuid.uuid4().hex
    return PendingCall(
        cluster,
        address,
        f"{role}.{BUILD}",
        host.build,
        role,
        spec,
        token,
        token=token,
        wake=wake,
        starts=True,
    )


def submit(
    cluster: Cluster,
    address: str,
    call: Call[R],
    *,
    deadline: float,
    cancel: threading.Event | None = None,
    slot: bool = True,
    aside: bool = False,
) -> R:
    """Make a call on one worker's engine and wait for its result; `slot` as in PendingCall.

    aside: past the worker's slots and threads, beside however many other calls.

    Raises the engine's own exception (with a note: worker and its traceback), WorkerLost,
    CallDeadline (the worker has been killed), StaleCall, EngineMissing, CallCancelled (`cancel`
    was set; the call itself may go on) or ClusterLost.
    """
    pending = start(cluster, address, call, deadline=deadline, slot=slot, aside=aside)
    where = f"by {call.label} on worker {pending.worker} ({address})"
    return value_of(pending.wait(deadline, cancel), where)


def start(
    cluster: Cluster,
    address: str,
    call: Call[R],
    *,
    deadline: float,
    wake: threading.Event | None = None,
    slot: bool = True,
    aside: bool = False,
) -> PendingCall[R]:
    """Begin `submit`; `wake` and `slot` as in PendingCall."""
    token = uuid.uuid4().hex
    return PendingCall(
        cluster,
        address,
        call.label,
        host.call,
        call,
        token,
        deadline + GRACE,
        cluster.pushed.topic,
        aside,
        token=token,
        slot=slot and not aside,
        wake=wake,
        starts=call.method in STARTS,
        pushed=True,
    )


def control(cluster: Cluster, address: str, call: Call[R], *, timeout: float = 30.0) -> R:
    """Make a short call (how it is, end these shards) past the calls that fill the worker."""
    result: CallResult[R] = _run_on(cluster, address, host.aside, call, "", None, timeout=timeout)
    return value_of(result, f"by {call.label} on worker {cluster.table.name_of(address)}")


def stop(cluster: Cluster, address: str, role: str) -> bool:
    """Close the engine of a role on a worker; False when there was none."""
    result: CallResult[bool] = _run_on(cluster, address, host.stop, role, timeout=STOP)
    return value_of(result, f"stopping {role} on worker {cluster.table.name_of(address)}")


def status_of(cluster: Cluster, address: str, *, timeout: float = STATUS) -> HostStatus:
    """What one worker holds and does; TimeoutError when it does not answer."""
    status: HostStatus = _run_on(cluster, address, host.status, timeout=timeout)
    return status


def _run_on(
    cluster: Cluster, address: str, function: Callable[..., object], *args: object, timeout: float
) -> Any:
    lost = WorkerLost(cluster.table.name_of(address), f"there is no worker at {address}")
    if cluster.pool_of(address) is None:
        raise lost  # Dask would try to connect to it for half a minute
    try:
        answers = cluster.ask(
            cluster.client.run, function, *args, workers=[address], timeout=timeout
        )
    except ValueError:
        # Dask's word for an address that is no worker's.
        raise lost from None
    return answers[address]


LATE = 30.0  # seconds in which a broadcast must end once nobody runs its call any more


def submit_to_all(
    cluster: Cluster,
    pool: str,
    workers: Mapping[str, str],
    call: Call[R],
    *,
    deadline: float,
    cancel: threading.Event | None = None,
) -> dict[str, R | InfrastructureError]:
    """Make a call on workers of a pool at once; what each engine returned, or its failure.

    `workers`: name -> address. Returns name -> value, once all have ended; an InfrastructureError in
    its place says that the worker was lost, was killed at the deadline (seconds), or that its
    machinery failed.

    Raises what else an engine raised, CallCancelled (the calls themselves may go on), ClusterLost.
    """
    if not workers:
        return {}
    token = uuid.uuid4().hex
    args = (call, token, deadline + GRACE)
    answers, killed = _answers(cluster, list(workers.values()), args, token, deadline, cancel)

    def outcome(name: str, address: str) -> R | InfrastructureError:
        answer: CallResult[R] | Exception = answers[address]
        if isinstance(answer, CallResult):
            cluster.count(pool, answer)
            try:
                return value_of(answer, f"by {call.label} on worker {name} ({address})")
            except InfrastructureError as failure:
                return failure
        if address in killed:
            return CallDeadline(name, deadline, call.label)
        if isinstance(answer, InfrastructureError):  # it holds no host of engines (yet)
            return answer
        why = str(answer)
        if isinstance(answer, OSError):  # of the scheduler's connection, which says no more
            why = cluster.why_gone(address)
        return WorkerLost(name, f"{why}; {call.label} was under way{cluster.log_hint(name)}")

    return {name: outcome(name, address) for name, address in workers.items()}


def _answers(
    cluster: Cluster,
    addresses: list[str],
    args: tuple[Any, ...],
    token: str,
    deadline: float,
    cancel: threading.Event | None,
) -> tuple[Mapping[str, Any], frozenset[str]]:
    """What the workers answered, or why one did not; and who was killed for being late."""

    async def ask() -> dict[str, Any]:
        answers: dict[str, Any] = await cluster.client.run(
            host.aside, *args, workers=addresses, on_error="return"
        )
        return answers

    cluster.check()
    loop = cast("BaseAsyncIOLoop", cluster.client.loop).asyncio_loop
    answers = asyncio.run_coroutine_threadsafe(ask(), loop)
    until, killed = time.monotonic() + deadline, frozenset[str]()
    while not wait([answers], timeout=SLICE).done:
        raise_if_set(cancel)
        cluster.check()
        if time.monotonic() < until:
            continue
        late = _still_running(cluster, addresses, token)
        if not late:
            raise cluster.why_lost("the Dask scheduler has not passed on what workers answered")
        killed |= frozenset(cluster.kill(late))
        until = time.monotonic() + LATE
    try:
        return answers.result(), killed
    except OSError as error:
        cluster.check()
        raise cluster.why_lost(f"the Dask scheduler cannot be reached: {error}") from error


def _still_running(cluster: Cluster, addresses: Sequence[str], token: str) -> list[str]:
    """The workers that still run a call, or do not say."""

    async def is_late(address: str) -> bool:
        try:
            answers = cluster.client.run(host.status, workers=[address])
            status = (await asyncio.wait_for(answers, STATUS))[address]
        except TimeoutError:
            return True
        except (OSError, ValueError):
            return False  # it is gone, and the broadcast knows
        return any(call.token == token for call in status.running)

    async def ask() -> list[bool]:
        return await asyncio.gather(*map(is_late, addresses))

    late: list[bool] = cluster.ask(ask)
    return [address for address, is_so in zip(addresses, late, strict=True) if is_so]
