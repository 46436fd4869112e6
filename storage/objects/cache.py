"""Byte ranges of stores a network away: a bounded cache, and joining those that lie close."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from storage.objects.backends import Range


class ByteCache:
    """The most recently used ranges, at most `limit` bytes of them. Safe to use from threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._lock = threading.Lock()
        self._ranges: OrderedDict[Range, memoryview] = OrderedDict()

    def get(self, where: Range) -> memoryview | None:
        with self._lock:
            found = self._ranges.get(where)
            if found is not None:
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


def merge_ranges(ranges: Sequence[Range], gap: int) -> tuple[list[Range], list[tuple[int, int]]]:
    """Join ranges of one object that lie at most `gap` bytes apart.

    Returns the joined ranges and, for each given one, its (number among them, offset within).
    """
    merged: list[Range] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(ranges)
    for number in sorted(range(len(ranges)), key=lambda number: ranges[number]):
        key, start, stop = ranges[number]
        if merged and merged[-1][0] == key and start <= merged[-1][2] + gap:
            first = merged[-1][1]
            merged[-1] = (key, first, max(stop, merged[-1][2]))
        else:
            first = start
            merged.append((key, start, stop))
        places[number] = (len(merged) - 1, start - first)
    return merged, places
