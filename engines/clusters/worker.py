"""A Dask worker in a job or pod of its own: `dask worker` with our settings.

    python -m engines.clusters.worker SCHEDULER [OPTIONS OF dask worker]

It listens only on the address by which it reaches the scheduler, and keeps its files in a folder that
only its user can open.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from configs.environment import import_from_working_folder
from configs.process import begin_process, close_to_others, machine_folder
from engines.processes import dask_settings

dask_settings.apply()  # before Dask reads them

from distributed.cli.dask_worker import main as dask_worker  # noqa: E402
from distributed.comm import get_address_host  # noqa: E402
from distributed.utils import get_ip  # noqa: E402

from engines.processes.node import start_fork_server  # noqa: E402

FOLDER = "--local-directory"
SCHEDULER = "DASK_SCHEDULER_ADDRESS"  # where Dask's operator for Kubernetes says it


def scratch_folder(words: Sequence[str]) -> str:
    """Where the worker keeps its files: below what `--local-directory` names, for its user alone.

    Dask's own name there, dask-scratch-space, could be made first by anybody, and be read.
    """
    place = words[words.index(FOLDER) + 1] if FOLDER in words else None
    return str(machine_folder("workers", place))


def main() -> None:
    """Serve until the job ends or the scheduler is gone."""
    begin_process()
    close_to_others()
    import_from_working_folder()
    words = sys.argv[1:]
    if not words or words[0].startswith("-"):
        words.insert(0, os.environ[SCHEDULER])
    host = get_ip(get_address_host(words[0]))
    start_fork_server()
    options = ["--host", host, "--dashboard-address", "127.0.0.1:0", "--memory-limit", "0"]
    dask_worker([*words, *options, FOLDER, scratch_folder(words)])  # the last of an option counts


if __name__ == "__main__":
    main()
