"""One writer per run: a lease with an epoch that grows, kept in the store beside HEAD.

The epoch is the fencing token: every engine call carries it, and workers refuse an older one. A
holder on another machine, whose wall clock may be minutes off, is judged by the renewals that are
seen, also where its lease has run out by the clock here. A holder that is known to be dead, because
it ran on this machine, is not waited for.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Self

import psutil

from storage.objects import documents
from storage.objects.documents import StoredRecord
from storage.objects.errors import Conflict, ObjectMissing, StoreError
from storage.runs.run_store import RunStore

FORMAT = "refrain.lease/1"
GRACE = 0.1  # share of its ttl that a lease is respected beyond its end
RENEWALS = 3  # of each ttl, by `keep`
TTL = 60.0  # seconds
MOST_APART = 3600.0  # seconds by which the wall clocks of two machines may differ where one waits
LOOK = 1.0  # seconds between looks by who waits
RUN_OUT = TTL * (1 + GRACE) + 1.0  # seconds after which one that nobody renews has run out


class LeaseHeld(StoreError):
    """Another live process holds the run."""


class LeaseLost(StoreError):
    """This process's lease was taken over, or ran out before it could be renewed."""


class LeaseHolder(StoredRecord):
    """What the store says about who holds the run."""

    owner: str  # for people, such as the flow run's name
    host: str  # machine and, in a container, its process namespace
    pid: int
    started: float  # of the process, in seconds since 1970: tells a reused pid
    nonce: str  # of this acquisition
    epoch: int
    ttl: float  # seconds
    expires: float  # seconds since 1970; 0 once released

    def gone(self, now: float) -> bool:
        """Whether the run may be taken over: released, run out, or known to be dead."""
        return now > self.expires + GRACE * self.ttl or self._dead()

    def may_live(self, now: float) -> bool:
        """Whether a lease that has run out may be one of another machine whose clock is behind."""
        elsewhere = self.expires > 0 and self.host != _host()
        return elsewhere and now <= self.expires + MOST_APART

    @property
    def last_seen(self) -> float | None:
        """When it last renewed the lease, in seconds since 1970; None once released."""
        return self.expires - self.ttl if self.expires else None

    def _dead(self) -> bool:
        if self.host != _host():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) > 1.0
        except psutil.NoSuchProcess:
            return True


class RunLease:
    """A lease that this process holds. `acquire` makes one; as a context it renews itself."""

    def __init__(
        self, run: RunStore, holder: LeaseHolder, data: bytes, clock: Callable[[], float]
    ) -> None:
        self._run = run
        self._holder = holder
        self._data = data
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost: str | None = None
        self.died: LeaseHolder | None = (
            None  # the holder before, where it did not release the lease
        )

    @classmethod
    def acquire(
        cls,
        run: RunStore,
        owner: str,
        ttl: float = TTL,
        clock: Callable[[], float] = time.time,
        silent: bytes | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> RunLease:
        """Take the run for `ttl` seconds. Raises LeaseHeld naming a live holder.

        A lease of another machine that has run out by the clock here is watched before, for half of
        its ttl, in which a process that lives would renew it.

        silent: what the store says of a holder that was seen not to renew its lease (LeaseWatch).
        """
        while True:
            current = _read(run)
            now = clock()
            if current is not None and current[1] != silent and not current[0].gone(now):
                raise _held(run, current[0], f"for the next {current[0].expires - now:.0f} s")
            if current is not None and current[1] != silent and current[0].may_live(now):
                _watch_for_renewals(run, *current, sleep)
                silent = current[1]
                continue
            holder = LeaseHolder(
                owner=owner,
                host=_host(),
                pid=os.getpid(),
                started=psutil.Process().create_time(),
                nonce=uuid.uuid4().hex,
                epoch=1 if current is None else current[0].epoch + 1,
                ttl=ttl,
                expires=now + ttl,
            )
            data = documents.encode(FORMAT, holder.model_dump(mode="json"))
            try:
                run.store.replace(run.lease_key, data, None if current is None else current[1])
            except Conflict:
                continue  # another process was faster: look who
            lease = cls(run, holder, data, clock)
            lease.died = current[0] if current is not None and current[0].expires else None
            return lease

    @property
    def epoch(self) -> int:
        """The fencing token: larger than that of every earlier holder."""
        return self._holder.epoch

    @property
    def owner(self) -> str:
        return self._holder.owner

    def renew(self) -> None:
        """Hold the run for another ttl from now. Raises LeaseLost."""
        with self._lock:
            self._raise_if_lost()
            self._swap(self._clock() + self._holder.ttl)

    def check(self) -> None:
        """Make sure, by the store, that the run is still ours. Raises LeaseLost."""
        with self._lock:
            self._raise_if_lost()
            current = _read(self._run)
            if current is None or current[0].nonce != self._holder.nonce:
                self._lose("no longer says so" if current is None else _taken(current[0]))
            if self._clock() > self._holder.expires:
                self._lose("has run out")

    def release(self) -> None:
        """Let the next process have the run at once. A lost lease is left alone."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            if self._lost is None:
                self._swap(0.0)
                self._lost = "was released"

    def keep(self) -> None:
        """Renew in a thread until `release`, or until the lease is lost (see `check`)."""
        self._thread = threading.Thread(target=self._renew_always, name="run-lease", daemon=True)
        self._thread.start()

    def _renew_always(self) -> None:
        while not self._stop.wait(self._holder.ttl / RENEWALS):
            try:
                self.renew()
            except LeaseLost:
                return
            except StoreError:
                continue  # the store may come back before the lease runs out

    def _swap(self, expires: float) -> None:
        renewed = self._holder.model_copy(update={"expires": expires})
        data = documents.encode(FORMAT, renewed.model_dump(mode="json"))
        try:
            self._run.store.replace(self._run.lease_key, data, self._data)
        except Conflict:
            current = _read(self._run)
            self._lose("is gone" if current is None else _taken(current[0]))
        self._holder, self._data = renewed, data

    def _lose(self, how: str) -> None:
        self._lost = how
        self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise LeaseLost(
                f"The lease of {self._holder.owner} (epoch {self.epoch}) on run {self._run.run} "
                f"{self._lost}; this process must not write to the run any more."
            )

    def __enter__(self) -> Self:
        self.keep()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class LeaseWatch:
    """Whether the process that holds a run lives, by the renewals of its lease that are seen.

    On another machine the wall clock may be minutes off. What counts is for how long the lease has
    not changed, by this process's own clock.
    """

    def __init__(
        self,
        run: RunStore,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._clock, self._monotonic = run, clock, monotonic
        self._since = monotonic()
        self.seen: bytes | None = None  # what the store said at the last look
        self.last: LeaseHolder | None = None  # the same, of a process that may have ended

    @property
    def unchanged(self) -> float:
        """Seconds since the lease was first seen as it is."""
        return self._monotonic() - self._since

    def look(self) -> LeaseHolder | None:
        """Who holds the run; None when nobody does, or nobody that lives."""
        current = _read(self._run)
        if current is None:
            return None
        holder, data = current
        self.last = holder
        if data != self.seen:
            self.seen, self._since = data, self._monotonic()
        if holder.host == _host():
            gone = holder.gone(self._clock())
        else:
            silent = self.unchanged > (1 + GRACE) * holder.ttl
            gone = silent or self._clock() > holder.expires + MOST_APART
        return None if gone else holder


def acquire_patiently(
    run: RunStore,
    owner: str,
    patience: float = RUN_OUT,
    watch: LeaseWatch | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> RunLease:
    """Take the run from a process that may have been killed. Raises LeaseHeld where it lives.

    patience: seconds for which one that renews its lease may yet end; the next renewal says that it
    lives. One that is silent by then is waited for until it has been so for its ttl.
    """
    watch = watch or LeaseWatch(run)
    waited, before = 0.0, None
    while (holder := watch.look()) is not None:
        if waited > patience and watch.seen != before:
            raise _held(run, holder, f"and renews its lease after {waited:.0f} s of waiting for it")
        before = watch.seen
        sleep(LOOK)
        waited += LOOK
    return RunLease.acquire(run, owner, silent=watch.seen)


def _watch_for_renewals(
    run: RunStore, holder: LeaseHolder, data: bytes, sleep: Callable[[float], object]
) -> None:
    """LeaseHeld where a lease is renewed, though it has run out by the clock here."""
    waited = 0.0
    while waited < holder.ttl / 2:
        sleep(LOOK)
        waited += LOOK
        current = _read(run)
        if current is not None and current[1] != data:
            if current[0].nonce == holder.nonce and current[0].expires:
                raise _held(
                    run, holder, "and renews its lease, though by the clock here it ran out"
                )
            return


def _held(run: RunStore, holder: LeaseHolder, how_long: str) -> LeaseHeld:
    return LeaseHeld(
        f"Run {run.run} is being written by {holder.owner} (process {holder.pid} on {holder.host}) "
        f"{how_long}. Stop it, or choose another run name."
    )


def holder_of(run: RunStore, clock: Callable[[], float] = time.time) -> LeaseHolder | None:
    """Who writes the run now; None when nobody does."""
    current = _read(run)
    return None if current is None or current[0].gone(clock()) else current[0]


def _taken(holder: LeaseHolder) -> str:
    return f"was taken over by {holder.owner} (epoch {holder.epoch})"


def _read(run: RunStore) -> tuple[LeaseHolder, bytes] | None:
    try:
        data = run.store.read(run.lease_key)
    except ObjectMissing:
        return None
    body = documents.decode(FORMAT, run.lease_key, data)
    return documents.validated(LeaseHolder, run.lease_key, body), data


def _host() -> str:
    """Names the set of processes in which a pid means one process."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()
