"""Whether the Dask worker of this pod answers, and whether it works: what Kubernetes' probes call.

    python -P -m engines.clusters.pod_probe health        # ends with 0 if it answers
    python -P -m engines.clusters.pod_probe idle SECONDS  # waits until it carries out no call

The worker's pages are on loopback at a port of its choice, which it writes to a file: pods with their
node's network share its ports. Imports nothing of Dask, since it is called every half minute.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Worker

TIMEOUT = 20.0  # seconds for a page to answer
PAUSE = 1.0  # seconds between looks
EXECUTING = re.compile(r'^dask_worker_tasks\{state="executing"\} ([0-9.e+]+)$', re.MULTILINE)


def port_file() -> Path:
    """Where the worker's port is written."""
    return Path(tempfile.gettempdir(), f"refrain-worker-port-{os.getuid()}")


def dask_setup(worker: Worker) -> None:
    """What Dask calls in a worker that has this module as --preload."""
    new = port_file().with_suffix(".new")
    new.write_text(str(worker.http_server.port))
    new.replace(port_file())


def page(name: str) -> str:
    """A page of the worker; OSError if it does not answer."""
    port = int(port_file().read_text())
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://127.0.0.1:{port}/{name}", timeout=TIMEOUT) as answer:
        return str(answer.read().decode())


def calls() -> float:
    """Calls that the worker carries out now."""
    match = EXECUTING.search(page("metrics"))
    return float(match[1]) if match else 0.0


def wait_until_idle(seconds: float) -> bool:
    """Wait, no longer than that, until two looks in a row meet no call; whether they did.

    A worker that does not answer is not waited for.
    """
    until, before = time.monotonic() + seconds, True
    while time.monotonic() < until:
        try:
            busy = calls() > 0
        except OSError:
            return False
        if not busy and not before:
            return True
        before = busy
        time.sleep(PAUSE)
    return False


def main() -> int:
    """Do what the words say; returns the exit code."""
    what, *rest = sys.argv[1:]
    try:
        if what == "idle":
            wait_until_idle(float(rest[0]))
        else:
            page("health")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"The worker does not answer: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
