"""Work that people look at but no step waits for: metrics, artifacts, curves, tidying up."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """One thread that works off what it is given, in order. A failure is raised by the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._last: Future[object] | None = None

    def add(self, work: Callable[[], object]) -> None:
        """Do `work` after all that was added before, in the caller's context (its flow run)."""
        self._raise_failure()
        self._last = self._thread.submit(contextvars.copy_context().run, work)

    def drain(self) -> None:
        """Wait until everything is done."""
        if self._last is not None:
            self._last.result()

    def stop(self) -> None:
        """Give up what has not begun."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _raise_failure(self) -> None:
        if self._last is not None and self._last.done() and not self._last.cancelled():
            self._last.result()
