"""A run as it goes on, from its store alone: its commits, its lease, and what it says meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from configs.flows import command, resume_command
from storage.objects.errors import ObjectMissing, StoreUnavailable
from storage.runs.commit_log import head, read_outline
from storage.runs.live import Phase, Progress, is_done, read_end, read_live, read_progress
from storage.runs.run_lease import LeaseWatch
from storage.runs.run_store import RunStore, start_of
from tasks.commands.command import Answer, Request
from tasks.commands.inspect import state_of
from tasks.reporting.progress import step_line
from tasks.reporting.terminal import Terminal, aged, duration, plain, screen
from tasks.run.run_record import flow_of, settings_of

LOOK = 2.0  # seconds between looks at the store
PLAIN = 15.0  # seconds between lines of what goes on, where there is no terminal
SILENT = 30.0  # seconds after which it is said that a flow says nothing


def answer(request: Request) -> Answer:
    """Watch the run that was named, and whatever goes on with it, until it ends."""
    if request.arguments.steps < 0:
        raise ValueError(f"--steps {request.arguments.steps} is no number of steps. 0 shows none.")
    terminal = Terminal()
    terminal.console.quiet = request.arguments.json
    watch = Watch(request, terminal)
    try:
        with terminal.live(watch.shown):
            record = watch.until_the_end()
    except KeyboardInterrupt:
        terminal.say("No longer watched; the run goes on.", style="yellow")
        raise SystemExit(130) from None
    return Answer(record=record, shown=[], good=record["state"] == "finished")


class Watch:
    """One look after the other."""

    def __init__(
        self,
        request: Request,
        terminal: Terminal,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store, self._terminal = request.store, terminal
        self._clock, self._sleep = clock, sleep
        self._progress, self._at = Progress(epoch=0), clock()  # last word, and when it came
        self._said = clock() - PLAIN
        self._turn_to(request.files, request.arguments.steps)

    def _turn_to(self, files: RunStore, earlier: int) -> None:
        self._files, self._lease = files, LeaseWatch(files)
        self._steps, live = settings_of(files).steps, read_live(files)
        self._step = max(start_of(files), (head(files) or 0) - earlier)
        where = "" if live is None or live.host is None else f" on {live.host}"
        self._terminal.say(f"Run {files.run}: {self._steps} steps{where}")

    def shown(self) -> RenderableType:
        """What is on a terminal now."""
        return screen(self._now())

    def _now(self) -> Progress:
        old = self._clock() - self._at
        progress = aged(self._progress, old)
        if old < SILENT:
            return progress
        silent = Phase(name="nothing is heard of it", seconds=old)
        return Progress(epoch=0, step=progress.step, steps=self._steps, doing=silent)

    def until_the_end(self) -> dict[str, Any]:
        """Look until nobody works on the run; how it ended."""
        while True:
            try:
                ended = self._look()
            except StoreUnavailable as error:
                ended = None
                self._terminal.say(f"{error} It is asked again.", style="yellow")
            if ended is not None:
                return {"run": self._files.run, "state": ended, "step": self._step}
            if not self._terminal.is_live and self._clock() - self._said >= PLAIN:
                self._said = self._clock()
                self._terminal.say(plain(self._now()))
            self._sleep(LOOK)

    def _look(self) -> str | None:
        """Say what is new; in a word how the run has ended, if it has."""
        holder = self._lease.look()
        self._show_steps()
        if holder is not None:
            self._hear(holder.epoch)
            return None
        end = read_end(self._files)
        if not is_done(self._files, self._step) or end is None:
            return self._stopped()
        if end.rolled_back is not None:
            self._terminal.say(f"{self._files.run}: {state_of(False, True, end.rolled_back)}.")
            self._turn_to(replace(self._files, run=end.rolled_back.child), 0)
            return None
        self._terminal.say(f"{self._files.run} is finished: {self._step} steps are committed.")
        return "finished"

    def _show_steps(self) -> None:
        """Those that are committed; HEAD is left to the flow, which is about to move it."""
        with contextlib.suppress(ObjectMissing):
            while True:
                metrics = read_outline(self._files, self._step + 1).metrics
                self._step += 1
                narrow = step_line(self._step, self._steps, metrics, self._terminal.width)
                self._terminal.say(step_line(self._step, self._steps, metrics), shown=narrow)

    def _hear(self, epoch: int) -> None:
        progress = read_progress(self._files)
        if progress is None or progress.epoch != epoch:
            waiting = Phase(name="waiting for a word of the flow")
            progress = Progress(epoch=epoch, step=self._step, steps=self._steps, doing=waiting)
            if self._progress.epoch == epoch:
                return
        self._steps = progress.steps or self._steps  # a run that goes on may have been given more
        if progress != self._progress:
            self._progress, self._at = progress, self._clock()

    def _stopped(self) -> str:
        last, again = self._lease.last, ""
        if last is not None and last.last_seen is not None:
            ago = duration(max(time.time() - last.last_seen, 0.0))
            again = f"Its flow on {last.host.split()[0]} died: its last sign of life is {ago} old. "
        flow, run = flow_of(self._files), self._files.run
        self._terminal.say(f"{run} stopped after step {self._step}. {again}".rstrip(), style="red")
        self._terminal.say(f"What it said: {command('flows.logs', self._store, run)}")
        self._terminal.say(f"To go on: {resume_command(flow, self._store, run)}")
        return "died" if again else "stopped"
