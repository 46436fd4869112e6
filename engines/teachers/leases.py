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
        place = self._held.get(lease.address)
        if place is None and len(self._held) >= self._places:
            runs = ", ".join(sorted(place.lease.run for place in self._held.values()))
            raise ServiceRefused(
                FULL,
                f"it has places = {self._places}, all taken by other runs ({runs}); wait for one of "
                "them to end, or start it with more places",
            )
        if place is not None:
            self._check(place, lease.epoch)
        fresh = place is None or lease.epoch > place.lease.epoch
        if place is None or fresh:
            place = self._held[lease.address] = TakenPlace(lease=lease, until=0.0)
        place.until = self._clock() + self._seconds
        return fresh

    def held(self, address: str, epoch: int) -> TakenPlace:
        """The place from which a flow of a run asks. Refused where it has none."""
        place = self._held.get(address)
        if place is None or epoch > place.lease.epoch:
            raise ServiceRefused(GONE, "the run has no lease there")
        self._check(place, epoch)
        place.until = self._clock() + self._seconds
        return place

    def release(self, address: str, epoch: int) -> bool:
        """Give a place back; False where the flow has none."""
        place = self._held.get(address)
        if place is None or place.lease.epoch != epoch:
            return False
        del self._held[address]
        return True

    def ended(self) -> list[str]:
        """Take the places of runs that were not heard of for too long; their addresses."""
        now = self._clock()
        over = [address for address, place in self._held.items() if place.until < now]
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
