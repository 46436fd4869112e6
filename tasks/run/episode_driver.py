"""How many episodes a run plays at once, and the threads in which each is driven by itself."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from configs.episodes import EpisodesConfig
from engines.failures import InfrastructureError, NoWorkers
from engines.workers.cluster import raise_if_set
from tasks.run.attempts import ATTEMPTS, backoff
from tasks.run.shard_driver import ShardDriver, ShardRange

LOOK = 0.5  # seconds between looks at the end of the run
MOST = 1024  # episodes at once that are driven apart, where the settings have no limit
FULL = 0.9  # share of an engine's cache in use beyond which there are too many sequences
LESS = 0.75  # share of them that is left then
Result = TypeVar("Result")


@dataclass(slots=True, kw_only=True)
class AtOnceLimit:
    """A number of episodes at once that follows how full the engines' caches are.

    limit <- limit + 1 / limit at a turn that found room, while the limit is what bounds the number;
    limit <- LESS x limit at one that found a cache full, once in as many turns as there are episodes:
    additive increase, multiplicative decrease (Chiu and Jain, 1989). It begins at the most.
    """

    least: int
    most: float  # infinite: no limit
    limit: float = math.inf
    turns_left: int = 0  # that were under way at the last decrease, and tell nothing of it yet

    def __post_init__(self) -> None:
        self.limit = self.most

    def tell(self, cache_use: float | None, held: int) -> None:
        """A turn has ended.

        Args:
            cache_use: share of its engine's cache in use, 0 to 1; None: not known, and nothing moves.
            held: episodes that are played now.
        """
        self.turns_left = max(self.turns_left - 1, 0)
        if cache_use is None:
            return
        if cache_use < FULL:
            if held >= int(self.limit):
                self.limit = min(self.limit + 1 / self.limit, self.most)
        elif not self.turns_left:
            self.limit = max(LESS * min(self.limit, held), self.least)
            self.turns_left = held


class EpisodeDriver:
    """Of all shards and steps together; for several threads."""

    def __init__(self, settings: EpisodesConfig | None, cancelled: threading.Event) -> None:
        """`settings`: None is no limit; `cancelled` ends every wait."""
        self._limit = AtOnceLimit(least=1, most=math.inf)
        self._adapts, self._cancelled = False, cancelled
        if settings is not None:
            self._adapts = settings.drive == "apart"
            most = settings.at_once or (MOST if self._adapts else math.inf)
            self._limit = AtOnceLimit(least=settings.fewest_at_once, most=most)
        self._held = 0
        self._changed = threading.Condition()
        self._driver = ShardDriver(int(min(self._limit.most, MOST)), 1)

    @property
    def at_once(self) -> float:
        """Episodes that may be played at once now; infinite: no limit."""
        return self._limit.limit

    @contextlib.contextmanager
    def held(self, count: int) -> Iterator[None]:
        """So many more in the body, which waits for room; more than the limit come alone.

        Raises Cancelled when the run ends meanwhile.
        """
        with self._changed:
            while self._held and self._held + count > self._limit.limit:
                self._changed.wait(LOOK)
                raise_if_set(self._cancelled)
            self._held += count
        try:
            yield
        finally:
            with self._changed:
                self._held -= count
                self._changed.notify_all()

    def told(self, cache_use: float | None) -> None:
        """An engine has written a turn; `cache_use` as ShardStats has it."""
        if self._adapts:
            with self._changed:
                self._limit.tell(cache_use, self._held)

    def drive(
        self, step: int, shard: str, count: int, one: Callable[[int], Result]
    ) -> list[Result]:
        """What `one` returns for each of a shard's episodes, counted from 1: as ShardDriver.drive.

        An episode that lost an engine goes on with another, as often as a task is tried: over hours
        many may be lost, and each time the tries of a task would be those of all its episodes.
        """
        whole = ShardRange(1, count, count)
        return self._driver.drive(step, shard, whole, lambda number: self._again(one, number))

    def _again(self, one: Callable[[int], Result], number: int) -> Result:
        for tries in range(1, ATTEMPTS):
            try:
                return one(number)
            except NoWorkers:
                raise
            except InfrastructureError:
                if self._cancelled.wait(backoff(tries)):
                    raise
        return one(number)

    def close(self) -> None:
        """Begin nothing more."""
        self._driver.close()
