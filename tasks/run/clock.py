"""Where a run stands: which step is committed, what those under way draw, and what they hand on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from configs.grpo import GRPOConfig
from storage.prompts.cursor import Cursor
from storage.runs.commit_log import Commit, Ledger
from tasks.results import Carried, LeftOver
from tasks.run.known_rows import RowTracker
from tasks.run.opened_run import OpenedRun, Position
from tasks.run.retries import ATTEMPTS
from tasks.run.staleness_gate import Gate


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

    @property
    def ledger(self) -> Ledger:
        """Prompts of all steps so far."""
        return self.position.ledger

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
        left = cursor.remaining(self._config.data.epochs)
        return left is not None and left + carried < self._config.fewest_prompts

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
