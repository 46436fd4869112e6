"""The runs that a teacher serves: each holds a place for as long as it renews its lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engines.teachers.messages import PlaceLease, ServiceRefused

GONE, CONFLICT, FULL = 410, 409, 429  # HTTP statuses: no lease; another flow has it; no place


@dataclass(slots=True, kw_only=True)
class TakenPlace:
    """A place that a run has."""

    lease: PlaceLease
    until: float  # by the clock
    # What has been done for the run since it took the place.
    calls: int = 0
    tokens: int = 0  # of prompts and answers
    queue_seconds: float = 0.0
    seconds: float = 0.0  # of the engine


class Places:
    """Places by run; not safe to use from several threads at once."""

    def __init__(
        self, places: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`seconds`: that a lease lasts beyond its last renewal."""
        self._places = places
        self._seconds = seconds
        self._clock = clock
        self._held: dict[str, TakenPlace] = {}

    def renew(self, lease: PlaceLease) -> bool:
        """Give a run its place, or let it keep it; whether it is a new one.

        Refused where a newer flow of the run has it, and where there is no place.
        """
        held = self._held.get(lease.address)
        if held is None and len(self._held) >= self._places:
            runs = ", ".join(sorted(one.lease.run for one in self._held.values()))
            raise ServiceRefused(
                FULL,
                f"it has places = {self._places}, all taken by other runs ({runs}); wait for one of "
                "them to end, or start it with more places",
            )
        if held is not None:
            self._check(held, lease.epoch)
        fresh = held is None or lease.epoch > held.lease.epoch
        if held is None or fresh:
            held = self._held[lease.address] = TakenPlace(lease=lease, until=0.0)
        held.until = self._clock() + self._seconds
        return fresh

    def held(self, address: str, epoch: int) -> TakenPlace:
        """The place from which a flow of a run asks. Refused where it has none."""
        held = self._held.get(address)
        if held is None or epoch > held.lease.epoch:
            raise ServiceRefused(GONE, "the run has no lease there")
        self._check(held, epoch)
        held.until = self._clock() + self._seconds
        return held

    def release(self, address: str, epoch: int) -> bool:
        """Give a place back; False where the flow has none."""
        held = self._held.get(address)
        if held is None or held.lease.epoch != epoch:
            return False
        del self._held[address]
        return True

    def ended(self) -> list[str]:
        """Take the places of runs that were not heard of for too long; their addresses."""
        now = self._clock()
        over = [address for address, held in self._held.items() if held.until < now]
        for address in over:
            del self._held[address]
        return over

    @property
    def all(self) -> Mapping[str, TakenPlace]:
        """The places that are taken, by the run's address."""
        return dict(self._held)

    @staticmethod
    def _check(held: TakenPlace, epoch: int) -> None:
        if epoch < held.lease.epoch:
            raise ServiceRefused(
                CONFLICT,
                f"a flow with epoch {held.lease.epoch} has taken the run {held.lease.run} over, and "
                f"this one has epoch {epoch}",
            )
