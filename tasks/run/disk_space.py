"""A warning before the disk of a local store is full."""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path

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

    def after(self, step: int, written: float) -> str | None:
        """A sentence where the disk will be full soon; once each time that half of it is used up.

        To be asked when what the settings do not keep has been removed. `written`: bytes that the
        step wrote to the store.
        """
        if self._folder is None:
            return None
        left = shutil.disk_usage(self._folder).free
        self._seen.append((step, left))
        self._written.append(int(written))
        if self._told is not None and left > 2 * self._told:
            self._told = None  # somebody has made room
        if self._told is not None and left > self._told / 2:
            return None
        why = self._why(step, left)
        if why is None:
            return None
        self._told = left
        return (
            f"The disk of the store {self._folder} has {left / GIB:.1f} GiB left: {why}. Make room, "
            "or keep less: resume with smaller store.keep_steps, keep_versions, keep_registered or "
            "keep_snapshots. refrain gc says what they would remove."
        )

    def _why(self, step: int, left: int) -> str | None:
        most = max(self._written)
        if step < self._steps and left < 2 * most:
            return f"a step of this run writes up to {most / GIB:.1f} GiB"
        first, before = self._seen[0]
        if len(self._seen) < FEWEST or before <= left:
            return None
        a_step = (before - left) / (step - first)
        room = int(left / a_step)
        if room > min(SOON, self._steps - step):
            return None
        return f"it lost {a_step / GIB:.2g} GiB a step, and is full in about {room} steps"
