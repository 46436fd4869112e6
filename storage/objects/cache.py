"""A bounded cache of byte ranges, one per process and store, for stores a network away."""

from __future__ import annotations

import threading
from collections import OrderedDict

Range = tuple[str, int, int]  # key, first byte, byte after the last


class ByteCache:
    """The most recently used ranges, at most `limit` bytes of them. Safe to use from threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.hits = 0
        self.misses = 0
        self._lock = threading.Lock()
        self._ranges: OrderedDict[Range, memoryview] = OrderedDict()

    def get(self, where: Range) -> memoryview | None:
        with self._lock:
            found = self._ranges.get(where)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._ranges.move_to_end(where)
            return found

    def put(self, where: Range, data: memoryview) -> None:
        """Keep `data`, and forget the least recently used ranges that no longer fit."""
        with self._lock:
            old = self._ranges.pop(where, None)
            if old is not None:
                self.nbytes -= old.nbytes
            if data.nbytes > self.limit:
                return
            self._ranges[where] = data
            self.nbytes += data.nbytes
            while self.nbytes > self.limit:
                _, dropped = self._ranges.popitem(last=False)
                self.nbytes -= dropped.nbytes

    def forget(self, key: str) -> None:
        """Drop what is kept of an object that was written or deleted."""
        with self._lock:
            for where in [where for where in self._ranges if where[0] == key]:
                self.nbytes -= self._ranges.pop(where).nbytes
