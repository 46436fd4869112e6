"""What a run is, where it stands between two steps, and how full the disk of its store is."""

from __future__ import annotations

import shutil
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from configs.grpo import GRPOConfig
from storage.objects.store import Store
from storage.prompts.cursor import Cursor
from storage.prompts.source import PromptSource
from storage.runs.commit_log import Commit, Ledger
from storage.runs.opponents import Opponent
from storage.runs.run_store import Origin, RunStore
from tasks.results import Carried

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """See the module's docstring."""

    name: str
    flow: str  # package.module:function that makes it
    config: GRPOConfig
    files: RunStore
    source: PromptSource
    origin: Origin | None  # where it began, if not with the model's own weights
    start: int  # the version that it begins with
    epoch: int  # of the lease: how many processes have had it, this one included

    @property
    def store(self) -> Store:
        """That of its files."""
        return self.files.store


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedRun:
    """A run by its settings and by what the store says of it. Nothing is written, nobody kept out."""

    name: str
    flow: str  # package.module:function that makes it
    config: GRPOConfig
    files: RunStore
    source: PromptSource
    resumed: bool  # it is in the store already
    origin: Origin | None  # where it began, if not with the model's own weights
    seen: np.ndarray  # uint64 [rows], digests of the rows drawn before it began
    first: Cursor  # where its first step draws
    opponent: Opponent | None = None  # of another run; None: its own first version, or nobody

    @property
    def start(self) -> int:
        """The version that the run begins with."""
        return 0 if self.origin is None else self.origin.at


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a run stands between two steps."""

    head: int  # the last committed step; before the first, the version that the run begins with
    last: Commit | None  # of the step before the next one, which a fork inherits
    cursor: Cursor  # where the next step draws
    ledger: Ledger  # of all steps so far
    carried: Carried = field(default_factory=Carried)  # groups that go on in the next step

    @classmethod
    def after(cls, commit: Commit) -> Position:
        """Where the run stands once a step is committed."""
        cursor = Cursor.from_json(commit.cursor)
        return cls(
            head=commit.step,
            last=commit,
            cursor=cursor,
            ledger=commit.ledger,
            carried=Carried.of(commit),
        )


RECENT = 20  # steps by which it is told how fast the disk fills


FEWEST = 5  # steps that must have been seen before that is told


SOON = 50  # steps in which the disk must be full for a warning


GIB = 2**30


class DiskWarnings:
    """Warnings by how much of the disk is left after each step, whoever fills it."""

    def __init__(self, folder: Path | None, steps: int) -> None:
        """`folder`: of the store; None for one that is not local. `steps`: of the run."""
        self._folder, self._steps = folder, steps
        self._seen: deque[tuple[int, int]] = deque(maxlen=RECENT)  # step, bytes left
        self._written: deque[int] = deque(maxlen=RECENT)  # by a step, bytes
        self._told: int | None = None  # bytes left at the last warning

    def after(self, step: int, nbytes: float) -> str | None:
        """A sentence where the disk will be full soon; once each time that half of it is used up.

        To be asked when what the settings do not keep has been removed. `nbytes`: that the
        step wrote to the store.
        """
        if self._folder is None:
            return None
        free = shutil.disk_usage(self._folder).free
        self._seen.append((step, free))
        self._written.append(int(nbytes))
        if self._told is not None and free > 2 * self._told:
            self._told = None  # somebody has made room
        if self._told is not None and free > self._told / 2:
            return None
        why = self._why(step, free)
        if why is None:
            return None
        self._told = free
        return (
            f"The disk of the store {self._folder} has {free / GIB:.1f} GiB left: {why}. Make room, "
            "or keep less: resume with smaller store.keep_steps, keep_versions, keep_registered or "
            "keep_snapshots. refrain gc says what they would remove."
        )

    def _why(self, step: int, free: int) -> str | None:
        most = max(self._written)
        if step < self._steps and free < 2 * most:
            return f"a step of this run writes up to {most / GIB:.1f} GiB"
        first, before = self._seen[0]
        if len(self._seen) < FEWEST or before <= free:
            return None
        a_step = (before - free) / (step - first)
        room = int(free / a_step)
        if room > min(SOON, self._steps - step):
            return None
        return f"it lost {a_step / GIB:.2g} GiB a step, and is full in about {room} steps"
