"""How long steps take."""

from __future__ import annotations

import threading
import time


class StepTimes:
    """When steps began, and the last one was committed. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began: dict[int, float] = {}
        self._committed = 0.0

    def begin(self, step: int) -> None:
        """A step begins."""
        with self._lock:
            self._began[step] = time.monotonic()

    def seconds(self, step: int) -> float:
        """Seconds since a step began or, where steps overlap, since the one before was committed."""
        with self._lock:
            return time.monotonic() - max(self._began[step], self._committed)

    def committed(self, step: int) -> None:
        """A step is committed."""
        with self._lock:
            self._began.pop(step, None)
            self._committed = time.monotonic()
