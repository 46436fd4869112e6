"""Units of work on lease: any idle worker takes one, and a slow worker's goes to another one too.

Who is there is looked up again and again, so a worker that joins gets the next unit, and the unit of
one that leaves goes to whoever is idle. Work is written so that it may be done twice: the first
result counts. Neither torch nor Dask is needed here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from engines.failures import InfrastructureError
from engines.train.contract import UnitAttempt
from storage.objects.errors import StoreUnavailable

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
# Does a unit on the worker of a name and address, and waits for it.
Unit: TypeAlias = Callable[[str, str], Result]

LOOK = 0.2  # seconds between looks at who is there and whose lease is over
MOST_FAILURES = 4  # of a unit, by lost workers and the like, before its error is raised


@dataclass(kw_only=True, slots=True)
class UnitLease:
    """A unit with a worker."""

    unit: int
    worker: str
    since: float  # on the clock
    number: int  # 1 is the unit's first try
    started: float  # seconds since the epoch


@dataclass(kw_only=True, slots=True)
class Round(Generic[Result]):
    """Units that have to be done, and how far they are."""

    waiting: list[int]  # numbers of units that nobody has, in order
    leases: list[UnitLease] = field(default_factory=list)
    results: dict[int, Result] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)  # at each unit
    failures: Counter[int] = field(default_factory=Counter)
    error: BaseException | None = None  # ends the round
    tries: list[UnitAttempt] = field(default_factory=list)  # that have ended
    taken_over: int = 0  # units given to a second worker, since the first was slow


class UnitLeases:
    """Has units done by workers that come and go; each does one at a time."""

    def __init__(
        self,
        live: Callable[[], Mapping[str, str]],
        check: Callable[[], None],
        lease: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            live: Name -> address of the workers that are there; waits for one, then raises.
            check: Raises where there is nothing to wait for any more.
            lease: Seconds after which a unit goes to an idle worker too.
            clock: In seconds.
        """
        self._live, self._check = live, check
        self._lease, self._clock = lease, clock
        self._busy: set[str] = set()  # addresses; of rounds that are over too
        self._changed = threading.Condition()

    def done(self, units: Sequence[Unit[Result]]) -> tuple[list[Result], Round[Result]]:
        """The result of each unit, in order, and how it went.

        Raises what a unit raised, of lost workers and an unavailable store the MOST_FAILURES-th.
        Late work goes on meanwhile; its result is dropped.
        """
        now: Round[Result] = Round(waiting=list(range(len(units))))
        while len(now.results) < len(units):
            self._check()
            workers = self._live()
            with self._changed:
                if now.error is not None:
                    raise now.error
                for name, address in workers.items():
                    if address not in self._busy and (unit := self._next(now, name)) is not None:
                        self._hand_out(now, unit, units[unit], name, address)
                if len(now.results) < len(units) and now.error is None:
                    self._changed.wait(LOOK)
        return [now.results[number] for number in range(len(units))], now

    def _next(self, now: Round[Result], worker: str) -> int | None:
        """The unit that an idle worker gets: the first that nobody has, else the most overdue."""
        if now.waiting:
            return now.waiting.pop(0)
        last = {lease.unit: lease.since for lease in now.leases}  # the latest of each unit
        overdue = [
            (since, unit)
            for unit, since in last.items()
            if unit not in now.results and self._clock() - since >= self._lease
        ]
        if not overdue:
            return None
        unit = min(overdue)[1]
        slow = ", ".join(lease.worker for lease in now.leases if lease.unit == unit)
        logger.warning(
            "Unit %d has been with %s for longer than its lease of %g s; %s takes it over.",
            unit,
            slow,
            self._lease,
            worker,
        )
        now.taken_over += 1
        return unit

    def _hand_out(
        self, now: Round[Result], number: int, unit: Unit[Result], worker: str, address: str
    ) -> None:
        now.attempts[number] += 1
        lease = UnitLease(
            unit=number,
            worker=worker,
            since=self._clock(),
            number=now.attempts[number],
            started=time.time(),
        )
        now.leases.append(lease)
        self._busy.add(address)

        def work() -> None:
            result: list[Result] = []  # one, or none where it failed
            error: BaseException | None = None
            try:
                result.append(unit(worker, address))
            except BaseException as raised:  # judged below, and raised in the thread that waits
                error = raised
            with self._changed:
                self._busy.discard(address)
                now.leases.remove(lease)
                now.tries.append(_ended(lease, error))
                if error is None:
                    now.results.setdefault(number, result[0])
                elif number not in now.results:
                    self._failed(now, number, error)
                self._changed.notify_all()

        threading.Thread(target=work, name=f"unit-{number}", daemon=True).start()

    def _failed(self, now: Round[Result], number: int, error: BaseException) -> None:
        """Another worker gets the unit, unless it would fail there too."""
        passing = isinstance(error, InfrastructureError | StoreUnavailable)
        now.failures[number] += 1
        if not passing or now.failures[number] >= MOST_FAILURES:
            now.error = now.error or error
            return
        logger.warning("Unit %d failed and is given to another worker: %s", number, error)
        if all(lease.unit != number for lease in now.leases) and number not in now.waiting:
            now.waiting.insert(0, number)


def _ended(lease: UnitLease, error: BaseException | None) -> UnitAttempt:
    """How a lease ended, for the commit."""
    return UnitAttempt(
        unit=lease.unit + 1,
        number=lease.number,
        worker=lease.worker,
        started=lease.started,
        ended=time.time(),
        error="" if error is None else f"{type(error).__name__}: {error}",
    )
