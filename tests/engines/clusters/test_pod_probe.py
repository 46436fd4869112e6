"""Probes of a pod, on a real Dask worker: whether it answers, and whether it carries out a call."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from distributed import Client

from engines.clusters import pod_probe
from tests.ports import free_port

PROBE = [sys.executable, "-P", "-m", "engines.clusters.pod_probe"]


@pytest.mark.slow
@pytest.mark.cluster
def test_a_worker_tells_that_it_lives_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    port = free_port()
    host = ["--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    scheduler = [sys.executable, "-m", "engines.clusters.scheduler", *host]
    worker = [sys.executable, "-P", "-m", "engines.clusters.worker", f"tcp://127.0.0.1:{port}"]
    worker += ["--local-directory", str(tmp_path), "--preload", "engines.clusters.pod_probe"]

    def probe(*words: str) -> int:
        return subprocess.run([*PROBE, *words], env=environment, capture_output=True).returncode

    processes = [subprocess.Popen(scheduler, env=environment)]
    try:
        assert probe("health") == 1  # no worker has told its port
        processes.append(subprocess.Popen(worker, env=environment))
        with Client(f"tcp://127.0.0.1:{port}", timeout=60) as client:
            client.wait_for_workers(1, timeout=60)
            assert probe("health") == 0
            assert pod_probe.calls() == 0
            future = client.submit(time.sleep, 6)
            end = time.monotonic() + 5
            while pod_probe.calls() == 0:
                assert time.monotonic() < end
                time.sleep(0.1)
            timer = threading.Timer(0, future.result)
            timer.start()
            assert not pod_probe.wait_until_idle(1.0)  # no longer than that
            assert pod_probe.wait_until_idle(60.0)
            assert future.done()
        processes.pop().kill()
        end = time.monotonic() + 30
        while probe("health") == 0:
            assert time.monotonic() < end
        assert not pod_probe.wait_until_idle(60.0)  # nobody is waited for
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()
