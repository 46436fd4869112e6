"""Looks at a run's engines now and then, for its screen and for who watches it from elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from storage.objects.errors import StoreError
from storage.runs.live import remove_progress, write_progress
from storage.runs.run_store import RunStore
from tasks.reporting.progress_tracker import ProgressTracker
from tasks.reporting.screen import screen
from tasks.reporting.terminal import Terminal
from tasks.run.events import (
    EnginesReady,
    Listeners,
    RunBegan,
    RunClosing,
    WorkersAsked,
)
from tasks.run.machinery import Work

LOOK = 1.0  # seconds between looks that somebody sees
STORE = 5.0  # seconds between words to the store
CLOSE = 1.0  # seconds for which the store is waited for
PLAIN = 15.0  # seconds between lines that stay while engines start, where nothing else is seen


class ProgressWatch:
    """Between the first word of a run and its last, in a thread of its own."""

    def __init__(
        self,
        terminal: Terminal,
        tracker: ProgressTracker,
        files: RunStore,
        clock: Callable[[], float] = time.monotonic,
        look: float = LOOK,
    ) -> None:
        """files: the run, whose store is told too."""
        self._terminal, self._tracker, self._files = terminal, tracker, files
        self._clock, self._look = clock, look
        self._ready, self._over = threading.Event(), threading.Event()
        self._starts: Callable[[], Mapping[str, str]] = dict
        self._at_work: Callable[[], Work] | None = None
        self._live = contextlib.ExitStack()
        self._writing = threading.Lock()
        self._begun = False

    def listen(self, listeners: Listeners) -> None:
        """Hear when a run begins and ends."""
        listeners.on(WorkersAsked, self.workers_asked)
        listeners.on(RunBegan, self.run_began)
        listeners.on(EnginesReady, lambda event: self._ready.set())
        listeners.on(RunClosing, self.run_closing)

    def workers_asked(self, event: WorkersAsked) -> None:
        """Look from here on, and show it."""
        self._starts = event.starts
        self._ready.clear()
        self._live.enter_context(self._terminal.live(lambda: screen(self._tracker.progress())))
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._watch, name="progress", daemon=True).start()

    def run_began(self, event: RunBegan) -> None:
        """From here on engines may be at work."""
        self._at_work = event.at_work

    def run_closing(self, event: RunClosing) -> None:
        """Nothing more is said."""
        self._over.set()
        self._live.close()
        leaving = threading.Thread(target=self._leave, name="progress-end", daemon=True)
        leaving.start()
        leaving.join(CLOSE)  # while the lease is held

    def _watch(self) -> None:
        began = said = told = self._clock()
        told -= STORE
        while not self._over.wait(self._look):
            now = self._clock()
            due = now - told >= STORE
            if not self._ready.is_set():
                plain = not self._terminal.is_live and now - said >= PLAIN
                if plain or due or self._terminal.is_live:
                    starts = self._starts()
                    if self._ready.is_set() or self._over.is_set():
                        continue
                    text = self._tracker.start_seen(starts)
                    if plain:
                        self._terminal.say(f"{text}, for {now - began:.0f} s")
                        said = now
            elif self._at_work is not None and (due or self._terminal.is_live):
                self._tracker.seen(self._at_work())
            if due:
                told = now
                self._tell()

    def _tell(self) -> None:
        """A store that is away is no matter: who watches sees that nothing is said."""
        with self._writing, contextlib.suppress(StoreError):
            if not self._over.is_set():
                write_progress(self._files, self._tracker.progress())

    def _leave(self) -> None:
        with self._writing, contextlib.suppress(StoreError):
            remove_progress(self._files)
