"""Dask's settings in the processes that we start, and why each is as it is; the certificates of TLS.

Dask reads some of them when it is imported: call `apply` before that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
from pydantic import BaseModel, ConfigDict, Field

from configs.cluster import NoTls, TemporaryTls, Tls

if TYPE_CHECKING:
    from distributed import Scheduler, Security

SETTINGS = {
    # vLLM starts processes; daemonic ones may not (https://github.com/dask/distributed/issues/2718).
    "distributed.worker.daemon": False,
    "distributed.worker.multiprocessing-method": "forkserver",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.scheduler.allowed-failures": 0,  # else a dead worker's finished task runs again
    "distributed.scheduler.worker-ttl": None,  # a call may hold the GIL for long
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.diagnostics.nvml": False,
    # What is submitted while something runs joins one history, which never ends where some shard
    # always runs: the scheduler would grow by a kilobyte a call for as long as a run lasts.
    "distributed.diagnostics.computations.max-history": 0,
    "distributed.scheduler.preload": [__name__],  # dask_setup below
    # Every connection keeps its last messages, for developers: the scheduler 1,000 for each worker,
    # which are megabytes where a message is a call.
    "distributed.admin.low-level-log-length": 10,
    "distributed.admin.tick.limit": "1h",  # the same: no warning about a held GIL
    # Every scheduler, nanny and worker looks fifty times a second whether its loop is late, which is
    # for that warning, and twice at the processor and memory of its process, for a dashboard.
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.gil.enabled": False,
    # A dead worker or scheduler is reported where its call was waited for.
    "distributed.logging": {
        "distributed": "error",
        "distributed.scheduler": "critical",
        "distributed.worker": "critical",
    },
}


def apply() -> None:
    """Set them in this process."""
    dask.config.set(SETTINGS)


def dask_setup(scheduler: Scheduler) -> None:
    """What Dask calls in a scheduler: it shall keep no statistics of calls that have ended.

    Dask makes a span, with its groups of tasks, whenever a call comes to an idle scheduler, and never
    lets go of one; there is no setting against it.
    """
    from distributed.spans import SpansSchedulerExtension

    class NoSpans(SpansSchedulerExtension):
        """Takes what the scheduler and its workers tell, and keeps none of it."""

        def observe_tasks(self, *args: Any, **kwargs: Any) -> dict[Any, dict[Any, Any]]:
            return {}

        def heartbeat(self, *args: Any) -> None:
            pass

    scheduler.extensions["spans"] = NoSpans(scheduler)


class Certificates(BaseModel):
    """One certificate for every process of a cluster: paths of PEM files, or the PEM text itself."""

    model_config = ConfigDict(frozen=True)

    ca: str  # of the authority that signed it
    cert: str
    key: str = Field(repr=False)

    def security(self) -> Security:
        """As Dask takes it, for every role."""
        from distributed import Security

        return Security(
            require_encryption=True,
            tls_ca_file=self.ca,
            tls_client_cert=self.cert,
            tls_client_key=self.key,
            tls_scheduler_cert=self.cert,
            tls_scheduler_key=self.key,
            tls_worker_cert=self.cert,
            tls_worker_key=self.key,
        )

    def as_files(self, folder: Path) -> Certificates:
        """The same as files that only this user can read."""
        if "\n" not in self.key:
            return self
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        paths = {}
        for name, text in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            paths[name] = str(folder / f"{name}.pem")
            descriptor = os.open(paths[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w") as file:
                file.write(text)
        return Certificates(**paths)


def certificates_for(tls: Tls) -> Certificates | None:
    """The certificates that the settings ask for; ValueError when a file of them is missing."""
    if isinstance(tls, NoTls):
        return None
    if isinstance(tls, TemporaryTls):
        from distributed import Security

        pair = Security.temporary()
        return Certificates(ca=pair.tls_ca_file, cert=pair.tls_client_cert, key=pair.tls_client_key)
    files = {"ca_file": tls.ca_file, "cert": tls.cert, "key": tls.key}
    for name, path in files.items():
        if not Path(path).is_file():
            raise ValueError(f"cluster.tls.{name} = {path} is no file. Set it to a PEM file.")
    return Certificates(
        ca=os.path.abspath(tls.ca_file),
        cert=os.path.abspath(tls.cert),
        key=os.path.abspath(tls.key),
    )
