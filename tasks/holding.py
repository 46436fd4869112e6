"""The flow's hold on its run: one flow at a time, kept by renewing a lease in the store."""

from __future__ import annotations

import os
import socket
import threading

from configs.environment import user
from storage.leases import RunLease
from storage.runs import RunStore

TTL = 60.0  # seconds without renewal after which another flow may take the run over
RENEW_EVERY = 15.0


class Holding:
    """A run's lease, renewed by a thread until it is released."""

    def __init__(self, files: RunStore) -> None:
        owner = f"{user()}@{socket.gethostname()} process {os.getpid()}"
        self._lease = RunLease.acquire(files, owner, TTL)
        self.epoch = self._lease.epoch
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_EVERY):
            self._lease.renew()

    def release(self) -> None:
        """Give the run up, so that another flow can take it at once."""
        self._stop.set()
        self._thread.join(timeout=5)
        self._lease.release()
