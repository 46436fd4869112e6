"""Waits for workers while a pool has too few: told every half minute, once for all who wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

EVERY = 30.0  # seconds between two lines, and before the first: workers take these to start
GAP = 30.0  # seconds without anybody who waits, after which another outage begins


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A wait for workers, as it is told."""

    pool: str
    there: int  # live workers of the pool
    needed: int
    since: float  # when the first who waits began to, in seconds since 1970
    until: float  # when the wait that is told gives up, likewise
    limit: float  # seconds that a wait takes at most
    cause: str  # what became of the pool's last worker that was lost; empty: none was


Say: TypeAlias = Callable[[Wait], object]


@dataclass(slots=True)
class _Outage:
    since: float
    looked: float  # when somebody waited last
    told: float


class Outages:
    """The waits of a cluster's pools. Safe to use from several threads, which wait for one pool."""

    def __init__(self) -> None:
        self.say: Say = lambda wait: None
        self._pools: dict[str, _Outage] = {}
        self._lock = threading.Lock()

    def waiting(
        self, pool: str, there: int, needed: int, left: float, limit: float, cause: str
    ) -> None:
        """Somebody still waits for a pool, for `left` seconds more at most; tells it where due."""
        now = time.time()
        with self._lock:
            outage = self._pools.get(pool)
            if outage is None or now - outage.looked > GAP:
                outage = self._pools[pool] = _Outage(since=now, looked=now, told=now)
            outage.looked = now
            if now - outage.told < EVERY:
                return
            outage.told = now
        self.say(
            Wait(
                pool=pool, there=there, needed=needed, since=outage.since, until=now + left,
                limit=limit, cause=cause,
            )
        )  # fmt: skip

    def over(self, pool: str) -> None:
        """A pool has the workers that somebody waited for."""
        with self._lock:
            self._pools.pop(pool, None)
