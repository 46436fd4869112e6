"""Machines of a run, looked at in regular intervals for its page in MLflow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from storage.tracking.machine_samples import MachineSample
from tasks.reporting.page_queue import PageQueue

KEPT = 2000  # samples that wait while MLflow is away; the oldest go first


class MachineWatch:
    """A thread that looks at them, begun. What it saw is written by the page's queue."""

    def __init__(
        self,
        machines: Callable[[], Sequence[MachineSample]],
        log: Callable[[Sequence[MachineSample]], None],
        queue: PageQueue,
        every: float,
    ) -> None:
        """`machines`: looks at them; `log`: writes samples; `every`: seconds between looks."""
        self._machines, self._log, self._queue, self._every = machines, log, queue, every
        self._samples: deque[MachineSample] = deque(maxlen=KEPT)
        self._queued = False  # whether the queue has a write that has not been tried
        self._stop = threading.Event()
        threading.Thread(target=self._look, name="machines", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def _look(self) -> None:
        while not self._stop.wait(self._every):
            seen = self._machines()
            self._samples.extend(seen)
            if seen and not self._queued:
                self._queued = True
                self._queue.add("What machines did", self._write)

    def _write(self) -> None:
        """Those that wait; they are dropped once they are written."""
        self._queued = False
        samples = list(self._samples)
        self._log(samples)
        for _ in range(min(len(samples), len(self._samples))):
            self._samples.popleft()
