"""How much this process asks of its store, and how long the store takes to answer, by operation."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Upper bounds in seconds: from a local file to an object of gigabytes.
BOUNDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Counts since a process began, or between two looks."""

    requests: int = 0  # to an object store over HTTP, tries and retries; else operations
    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            requests=self.requests + other.requests,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
        )

    def __sub__(self, other: Usage) -> Usage:
        return Usage(
            requests=self.requests - other.requests,
            bytes_read=self.bytes_read - other.bytes_read,
            bytes_written=self.bytes_written - other.bytes_written,
        )


class Counter:
    """Adds up; safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Usage()

    def add(self, requests: int = 0, bytes_read: int = 0, bytes_written: int = 0) -> None:
        """Count something."""
        more = Usage(requests=requests, bytes_read=bytes_read, bytes_written=bytes_written)
        with self._lock:
            self._total += more

    def total(self) -> Usage:
        """Everything since this process began."""
        return self._total


COUNTER = Counter()  # of this process


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """The tries of one operation, since a process began or between two looks."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)  # by BOUNDS, the last of what is longer
    seconds: float = 0.0  # of all together
    failures: int = 0  # tries that raised; counted above too

    def __add__(self, other: Latency) -> Latency:
        return Latency(
            counts=tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            seconds=self.seconds + other.seconds,
            failures=self.failures + other.failures,
        )

    def __sub__(self, other: Latency) -> Latency:
        return Latency(
            counts=tuple(a - b for a, b in zip(self.counts, other.counts, strict=True)),
            seconds=self.seconds - other.seconds,
            failures=self.failures - other.failures,
        )


class Latencies:
    """Adds up; safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_operation: dict[str, Latency] = {}

    @contextlib.contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Count the body as one try. That an object is missing or there already is no failure."""
        began, failed = time.perf_counter(), 0
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except BaseException:
            failed = 1
            raise
        finally:
            self._add(operation, time.perf_counter() - began, failed)

    def _add(self, operation: str, seconds: float, failed: int) -> None:
        counts = [0] * (len(BOUNDS) + 1)
        counts[bisect.bisect_left(BOUNDS, seconds)] = 1
        self.add({operation: Latency(counts=tuple(counts), seconds=seconds, failures=failed)})

    def add(self, more: Mapping[str, Latency]) -> None:
        """Count tries, by operation, that another process of this one's work has counted."""
        with self._lock:
            for operation, tries in more.items():
                before = self._by_operation.get(operation, Latency())
                self._by_operation[operation] = before + tries

    def total(self) -> Mapping[str, Latency]:
        """By operation, since this process began."""
        with self._lock:
            return dict(self._by_operation)


LATENCIES = Latencies()  # of this process
