"""Where a run stands: which step is committed, what those under way draw and hand on, who waits.

With max_staleness = n up to n + 1 step flows run at once. Step k samples as soon as policy version
k - 1 - n is there and step k - 1 has drawn its prompts; it trains once step k - 1 is committed. So
the staleness of a sample, the version that trains (k - 1) less the version of its oldest token, time
in any queue included, is never above n; steps draw, train and are committed in order. With n = 0
nothing ever waits here. A feature may lower n between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.grpo import GRPOConfig
from engines.failures import CallCancelled
from storage.prompts.cursor import Cursor, Ranks, unranked
from storage.runs.commit_log import Commit
from storage.runs.curves import History, read_history, shown
from storage.runs.run_store import RunStore
from tasks.results import Carried, LeftOver
from tasks.run.attempts import ATTEMPTS
from tasks.run.facts import OpenedRun, Position

SLICE = 0.5  # seconds between looks at whether the run is cancelled
BOUND = "staleness/bound"  # metric: max_staleness for steps that begin after the commit


class StepGivenUp(RuntimeError):
    """A step was not made, since one before it failed or was to be the last."""


class WaitTooLong(RuntimeError):
    """A step waited longer than its deadline for the step before it."""


class Gate:
    """The counters that steps wait for; made anew from the last commit when a run is resumed."""

    def __init__(self, head: int, max_staleness: int, deadline: float, reserve: int = 0) -> None:
        """Begin at a step's commit, `head`.

        deadline: seconds that a wait may take in which no step is committed. reserve: versions of
        max_staleness that are left for groups which are carried to later steps.
        """
        self.head = head  # the last committed step
        self.max_staleness = max_staleness  # of steps that begin from now on
        self.deadline = deadline
        self._reserve = reserve
        self.cancelled = threading.Event()
        self.given_up = False  # cancelled for a failure, not by a person
        self._last: tuple[int, str] | None = None  # step after which none is made, and why
        self._end: tuple[int, Exception] | None = None  # step after which the run ends so
        self._drawn = head  # the last step that has drawn its prompts
        self._moved = time.monotonic()  # when a step was last committed
        self._changed = threading.Condition()

    def wait_to_begin(self, step: int) -> None:
        """Return when a step may draw and sample. StepGivenUp, WaitTooLong, CallCancelled."""
        what = f"policy version {self._oldest(step)} to sample with"
        self._wait(step, lambda: self.head >= self._oldest(step), what)
        self._wait(step, lambda: self._drawn >= step - 1, f"step {step - 1} to draw its prompts")

    def _oldest(self, step: int) -> int:
        """The version with which a step may begin to sample."""
        return step - 1 - max(0, self.max_staleness - self._reserve)

    def wait_to_train(self, step: int) -> None:
        """Return when a step may train: the one before it is committed. Raises as above."""
        self._wait(step, lambda: self.head >= step - 1, f"step {step - 1} to be committed")

    def check_turn(self, step: int) -> None:
        """ValueError for a step that would train before its turn: its flow does not wait."""
        if self.head < step - 1:
            raise ValueError(
                f"Step {step} was to train before step {step - 1} is committed. With max_staleness "
                "> 0 the flow of a step calls run.gate.wait_to_train(step) before it asks for "
                "log-probs, values or advantages."
            )

    def drawn(self, step: int) -> None:
        """A step has drawn its prompts."""
        with self._changed:
            self._drawn = max(self._drawn, step)
            self._changed.notify_all()

    def committed(self, step: int) -> None:
        """A step is committed."""
        with self._changed:
            self.head, self._moved = step, time.monotonic()
            self._drawn = max(self._drawn, step)
            self._changed.notify_all()

    def lower(self, max_staleness: int) -> None:
        """Steps that have not begun sample within this bound; those under way go on."""
        with self._changed:
            self.max_staleness = min(self.max_staleness, max_staleness)

    def end_after(self, step: int, error: Exception) -> None:
        """The run ends after a step: those after it are given up, and check_end raises the error."""
        self._end = (step, error)
        self._none_after(step, f"the run ends after step {step}")

    def check_end(self, step: int) -> None:
        """Raise the error by which the run ends after a step, if it does."""
        if self._end is not None and self._end[0] == step:
            raise self._end[1]

    def give_up(self) -> None:
        """End every wait of the run, since a step has failed; unless a person has ended it."""
        self.given_up = not self.cancelled.is_set()
        self.cancelled.set()

    def fail(self, step: int) -> None:
        """A step will not be made: those after it are given up, those before it go on."""
        self._none_after(step, f"step {step} failed")

    def _none_after(self, step: int, why: str) -> None:
        with self._changed:
            if self._last is None or step < self._last[0]:
                self._last = (step, why)
            self._changed.notify_all()

    def _wait(self, step: int, ready: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        with self._changed:
            while True:
                if self._last is not None and self._last[0] < step:
                    raise StepGivenUp(f"Step {step} is given up, since {self._last[1]}.")
                if ready():
                    return
                if self.cancelled.is_set():
                    raise CallCancelled(f"Step {step} waited for {what} when the run was ended.")
                waited = time.monotonic() - max(began, self._moved)
                if waited > self.deadline:
                    raise WaitTooLong(
                        f"Step {step} waited {waited:.0f} s for {what}, and no step was committed "
                        "meanwhile. Look at the tasks of that step (refrain logs RUN), or set "
                        "rollout.deadline or train.deadline higher; the run can be resumed."
                    )
                self._changed.wait(SLICE)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownRows:
    """What a draw goes by besides its cursor."""

    kept_out: NDArray[np.bool_] | None = None  # [rows of the data] in quarantine; None: no row
    ranks: Ranks = unranked  # by which rows are ordered, for an epoch of all, or of a task's
    readmissions: int = 0  # requests to readmit rows that it takes account of


class RowTracker:
    """Knows nothing of the rows of a run's data; a feature has one that follows the steps."""

    def for_draw(self, step: int) -> KnownRows:
        """What the draw of a step goes by."""
        return KnownRows()

    def has_drawn(self, step: int, cursor: Cursor) -> None:
        """A step has drawn up to a place."""

    def committed(self, commit: Commit) -> None:
        """A step is committed."""


class Clock:
    """Made anew from the last commit when a run is resumed. Holds the steps under way alone."""

    def __init__(self, opened: OpenedRun, position: Position, rows: RowTracker) -> None:
        """`rows`: what its draws go by."""
        self._config, self._origin, self._start = opened.config, opened.origin, opened.start
        self.position = position
        self.gate = Gate(
            position.head,
            self._config.max_staleness,
            _patience(self._config),
            self._config.reserved_versions,
        )
        # Step -> where it began to draw, and the groups handed on to it; from the head on.
        self.drawn: dict[int, Cursor] = {position.head + 1: position.cursor}
        self.carried: dict[int, Carried] = {position.head + 1: position.carried}
        self.left_over: dict[int, LeftOver] = {}  # step -> groups that it did not wait for
        self.rows = rows
        self._times = threading.Lock()
        self._began: dict[int, float] = {}  # step -> when, in seconds of time.monotonic
        self._committed = 0.0  # when the last one was

    def steps_left(self) -> Iterator[int]:
        """The steps that are not committed yet, counted from 1, each when it may begin.

        For as long as the data last. Raises as Gate.wait_to_begin does.
        """
        for step in range(self.position.head + 1, self._config.steps + 1):
            self.gate.wait_to_begin(step)
            if self.data_over(self.drawn[step], len(self.carried[step])):
                return
            yield step

    def begin(self, step: int) -> None:
        """A step begins."""
        with self._times:
            self._began[step] = time.monotonic()

    def seconds(self, step: int) -> float:
        """Seconds since a step began or, where steps overlap, since the one before was committed."""
        with self._times:
            return time.monotonic() - max(self._began[step], self._committed)

    def has_drawn(self, step: int, cursor: Cursor, carried: Carried) -> None:
        """A step has drawn its prompts, up to `cursor`, and hands groups on: the next one may."""
        self.rows.has_drawn(step, cursor)
        self.drawn[step + 1], self.carried[step + 1] = cursor, carried
        self.gate.drawn(step)

    def leave(self, step: int, cursor: Cursor, left_over: LeftOver) -> None:
        """A step, which drew up to `cursor`, does not wait for these groups."""
        self.left_over[step] = left_over
        self.has_drawn(step, cursor, left_over.carried)

    def data_over(self, cursor: Cursor, carried: int) -> bool:
        """Whether data.epochs leave too little for a step after `cursor`, carried groups counted."""
        rest = cursor.remaining(self._config.data.epochs)
        return rest is not None and rest + carried < self._config.fewest_prompts

    def oldest_version(self, step: int) -> int:
        """The first policy version with which a step may be sampled."""
        ahead = self._config.max_staleness - self._config.reserved_versions
        return max(step - 1 - ahead, self._start)

    def first_group(self, step: int) -> int:
        """Number of a step's first group of prompts; no two steps of a run or fork share one."""
        before = 0 if self._origin is None else self._origin.first_group
        return before + (step - 1 - self._start) * self._config.groups_numbered

    def snapshot_due(self, step: int, cursor: Cursor, carried: int) -> bool:
        """Whether the trainer's state is stored after a step that drew up to `cursor`.

        carried: groups that it hands on.
        """
        every, last = self._config.store.snapshot_every, self._config.steps
        return step % every == 0 or step == last or self.data_over(cursor, carried)

    def snapshot_after(self, commit: Commit) -> bool:
        """Whether the trainer's state is stored after a committed step."""
        return self.snapshot_due(commit.step, Cursor.from_json(commit.cursor), len(commit.carried))

    def advance(self, commit: Commit) -> None:
        """A step is committed; the next ones wait still, until the gate knows of it."""
        with self._times:
            self._began.pop(commit.step, None)
            self._committed = time.monotonic()
        self.position = Position.after(commit)
        self.drawn[commit.step + 1] = self.position.cursor
        self.carried[commit.step + 1] = self.position.carried
        for before in (self.drawn, self.carried, self.left_over):
            before.pop(commit.step, None)
        self.rows.committed(commit)


def _patience(config: GRPOConfig) -> float:
    """Seconds in which some step must be committed: every call may be tried to its deadline."""
    return ATTEMPTS * (config.most_rounds * config.rollout.deadline + config.train.deadline)


class StepHistory:
    """Grows with each commit; what stood in the store before is read when it is first asked for."""

    def __init__(self, files: RunStore, start: int, head: int) -> None:
        """`start`: the version that the run begins with; `head`: its last committed step."""
        self._files, self._head = files, head
        self._before: History | None = None if head > start else []
        self._own: History = []

    def add(self, commit: Commit) -> None:
        """A step is committed."""
        self._own.append((commit.step, shown(commit.metrics)))

    def steps(self) -> History:
        """Of every committed step; one thread at a time."""
        if self._before is None:
            self._before = read_history(self._files, self._head)
        return [*self._before, *self._own]
