"""Bytes that this process has read from and written to stores."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes moved since the process began."""

    read: int = 0  # asked for; of local files the pages that are really touched may be fewer
    written: int = 0


class Meter:
    """Counts; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = self._written = 0

    def read(self, nbytes: int) -> None:
        with self._lock:
            self._read += nbytes

    def written(self, nbytes: int) -> None:
        with self._lock:
            self._written += nbytes

    def total(self) -> Traffic:
        with self._lock:
            return Traffic(read=self._read, written=self._written)


METER = Meter()  # of this process
