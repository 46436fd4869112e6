"""What a run's picture and its table show of each step so far, those of earlier flows too."""

from __future__ import annotations

from storage.runs.commit_log import Commit
from storage.runs.curves import History, read_history, shown
from storage.runs.run_store import RunStore


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
