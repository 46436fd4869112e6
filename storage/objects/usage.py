"""How much this process asks of its store: requests, bytes read, bytes written."""

from __future__ import annotations

import threading
from dataclasses import dataclass


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
