"""What workers and engines that start are at: in the live line, or now and then in one that stays."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping

from configs.terminal_text import bytes_text
from tasks.reporting.terminal import Terminal
from tasks.run.events import EnginesReady, EngineStarted, Listeners, RunClosing, WorkersAsked

BYTES = re.compile(r"\b(\d+) bytes\b")  # in what an engine says
LOOK = 1.0  # seconds between looks
PLAIN = 15.0  # seconds between lines that stay, where there is no live one


class StartLine:
    """Between the first word of a run and its first step, which may be minutes apart."""

    def __init__(
        self,
        terminal: Terminal,
        clock: Callable[[], float] = time.monotonic,
        look: float = LOOK,
        plain: float = PLAIN,
    ) -> None:
        self._terminal, self._clock = terminal, clock
        self._look, self._plain = look, plain
        self._ready = threading.Event()
        self._waiting: tuple[str, ...] | None = None  # roles; None: workers are

    def listen(self, listeners: Listeners) -> None:
        """Hear what a run that starts says."""
        listeners.on(WorkersAsked, self.workers_asked)
        listeners.on(EngineStarted, self.engine_started)
        listeners.on(EnginesReady, lambda event: self._ready.set())
        listeners.on(RunClosing, lambda event: self._ready.set())

    def workers_asked(self, event: WorkersAsked) -> None:
        """Look from here on, in a thread of its own."""
        self._ready.clear()
        threading.Thread(
            target=self._follow, args=(event.starts,), name="start line", daemon=True
        ).start()

    def engine_started(self, event: EngineStarted) -> None:
        """One less is waited for."""
        self._waiting = event.waiting

    def _follow(self, starts: Callable[[], Mapping[str, str]]) -> None:
        began = said = self._clock()
        while not self._ready.wait(self._look):
            now = self._clock()
            if not self._terminal.is_live and now - said < self._plain:
                continue
            text = self.text(starts())
            if self._ready.is_set():
                return
            if self._terminal.is_live:
                self._terminal.doing(f"{text} · {now - began:.0f} s")
            else:
                self._terminal.say(f"{text}, for {now - began:.0f} s")
                said = now

    def text(self, phases: Mapping[str, str]) -> str:
        """phases: by worker, what the start of its engine is at."""
        if phases:
            return "Starting engines: " + "; ".join(
                f"{worker}: {BYTES.sub(_shown, phase)}" for worker, phase in sorted(phases.items())
            )
        if self._waiting is None:
            return "Starting workers and engines"
        if not self._waiting:
            return "Loading the first weights into the engines that sample"
        return f"Starting engines: {', '.join(self._waiting)}"


def _shown(count: re.Match[str]) -> str:
    return bytes_text(float(count[1]))
