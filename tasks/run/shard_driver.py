"""Task runs that drive several shards each, so that thousands of shards are a few dozen task runs.

A task run costs the flow and Prefect's server many milliseconds, however small its shard. Of more
shards a stage than `task_runs` says, several share one: their calls go out at the same time, each has
attempts of its own, and a retry repeats those alone that failed.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from prefect.futures import PrefectFuture

from configs.cluster import PoolConfig
from tasks.run.attempts import logged_together

FEWEST = 8  # task runs of a stage in a step that has at least so many shards
MOST = 48  # of all stages in a step together: with those that have no shards, about 64
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The shards of one task run, `first` to `last` out of `of`, counted from 1."""

    first: int
    last: int
    of: int

    def __str__(self) -> str:
        """For the task run's name: 3/8, or 5-8/64."""
        span = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{span}/{self.of}"

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __len__(self) -> int:
        return self.last - self.first + 1


def task_runs(pool: PoolConfig, stages: int) -> int:
    """Task runs of a stage in a step, at most: as many as the workers that score take at once.

    What a task run sampled is scored by one call, so fewer would leave some of them idle.

    Args:
        pool: of those that score.
        stages: of a step, that have shards.
    """
    return min(max(pool.workers * pool.slots, FEWEST), MOST // stages)


def shard_ranges(first: int, last: int, of: int, most: int) -> list[ShardRange]:
    """The shards `first` to `last`, of nearly equal numbers in at most so many parts."""
    count = last - first + 1
    number = min(most, count)
    edges = [first + count * k // number for k in range(number + 1)] if number else [first]
    return [ShardRange(a, b - 1, of) for a, b in itertools.pairwise(edges)]


class ShardDriver:
    """The threads in which the shards of task runs are driven, and which shards have ended."""

    def __init__(self, threads: int, task_runs: int) -> None:
        """`task_runs`: of a stage, at most.

        `threads`: shards at once; as many as the engines take, and some that wait.
        """
        self.task_runs = task_runs
        self._first = ThreadPoolExecutor(threads, thread_name_prefix="shards")
        # A shard that is tried again is due before those of later steps, which may be queued.
        self._again = ThreadPoolExecutor(threads, thread_name_prefix="shards-again")
        self._under_way: dict[tuple[int, str, int], Future[Any]] = {}
        self._ended: dict[int, list[int]] = {}  # step -> its shards that have been sampled
        self._changed = threading.Condition()

    def ranges(self, count: int, before: int = 0) -> list[ShardRange]:
        """The shards of each task run, of `count` shards that are numbered after `before` others.

        A later round of a step, which has others before, has the fewest task runs.
        """
        last = before + count
        most = min(self.task_runs, FEWEST) if before else self.task_runs
        return shard_ranges(before + 1, last, last, most)

    def drive(
        self, step: int, stage: str, shards: ShardRange, work: Callable[[int], Result]
    ) -> list[Result]:
        """Call `work` for all shards at once: what it returns for each, in their order.

        As soon as one raises, its error is raised here; the others go on in their threads, and the
        task run that is tried again waits for them instead of beginning them anew.
        """
        if len(shards) == 1:
            return [work(shard) for shard in shards]
        keys = [(step, stage, shard) for shard in shards]
        with logged_together():
            futures = [self._submit(key, work) for key in keys]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        for key in keys:
            del self._under_way[key]
        return [future.result() for future in futures]

    def _submit(self, key: tuple[int, str, int], work: Callable[[int], Result]) -> Future[Result]:
        """The call of `work` for a shard: the one that is under way or done, unless that failed."""
        before = self._under_way.get(key)
        if before is not None and not (before.done() and before.exception() is not None):
            return before
        threads = self._first if before is None else self._again
        # Prefect's context (task run, logger) is the thread's.
        future = threads.submit(contextvars.copy_context().run, work, key[2])
        self._under_way[key] = future
        return future

    def ended(self, step: int, shard: int) -> None:
        """A shard of a step has been sampled, or left."""
        with self._changed:
            self._ended.setdefault(step, []).append(shard)
            self._changed.notify_all()

    def wait_for(
        self, step: int, enough: int, among: Collection[int], tasks: Sequence[PrefectFuture[Any]]
    ) -> None:
        """Return when so many of these shards have ended; raises what a task raised that failed."""
        over: list[PrefectFuture[Any]] = []  # tasks whose result has not been looked at
        counted: set[int] = set()
        looked_at = 0  # ends of shards; each is looked at once

        def are_enough() -> bool:
            nonlocal looked_at
            ended = self._ended.get(step, [])
            counted.update(shard for shard in ended[looked_at:] if shard in among)
            looked_at = len(ended)
            return len(counted) >= enough

        def end(task: PrefectFuture[Any]) -> None:
            with self._changed:
                over.append(task)
                self._changed.notify_all()

        for task in tasks:
            task.add_done_callback(end)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: over or are_enough())
                results, over[:] = list(over), []
            for task in results:
                task.result()  # not result_of, which waits for every task of the step
            with self._changed:
                if are_enough():
                    return

    def committed(self, step: int) -> None:
        """Nothing of a step, or of those before it, is needed any more."""
        with self._changed:
            for before in [number for number in self._ended if number <= step]:
                del self._ended[before]

    def close(self) -> None:
        """Begin nothing more; what is under way ends with the engines."""
        self._first.shutdown(wait=False, cancel_futures=True)
        self._again.shutdown(wait=False, cancel_futures=True)
