"""One thread that looks, for all calls under way at once, whether something ends their wait.

A thread waits for each call. Were each to look for itself, a thousand of them would take a tenth of
a core for waking up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

SLICE = 0.5  # seconds between looks at a cancel event by those who wait for several calls
LOOK = 2.0  # seconds between looks; all calls wake at once when a worker leaves or the run ends


class Watched(Protocol):
    """A call that somebody waits for."""

    address: str
    attention: threading.Event  # the waiting thread looks for itself once this is set

    def overdue(self, now: float) -> bool:
        """Whether its deadline is over, or it has been cancelled."""

    def ended_unheard(self) -> bool:
        """Whether it has ended and nobody was told."""


class CallWatch:
    """Wakes those that wait for a call when its end has to be looked for."""

    def __init__(self, workers: Callable[[], Mapping[str, str]]) -> None:
        """`workers`: address -> pool of those that live; an error when the cluster is lost."""
        self._workers = workers
        self._calls: set[Watched] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._soon = threading.Event()

    @contextlib.contextmanager
    def over(self, call: Watched) -> Iterator[None]:
        """Watch over a call while the body waits for it."""
        with self._lock:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="calls", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)

    def look_now(self) -> None:
        """Look at once: something happened that may have ended a call."""
        self._soon.set()

    def close(self) -> None:
        """Wake everyone, and end."""
        self._closed.set()
        self._soon.set()
        self._wake_all()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._soon.wait(LOOK)
            self._soon.clear()
            try:
                workers = self._workers()
            except Exception:  # whoever waits meets it too, and says where
                self._wake_all()
                continue
            now = time.monotonic()
            with self._lock:
                calls = list(self._calls)
            for call in calls:
                if call.overdue(now) or call.address not in workers or call.ended_unheard():
                    call.attention.set()
        self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            for call in self._calls:
                call.attention.set()
