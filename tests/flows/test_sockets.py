"""What a run opens to the network: nothing. And TLS between its processes."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from storage.runs.live import read_live
from tests.flows.conftest import Launch
from tests.flows.test_grpo import wait_for_step

pytestmark = pytest.mark.cluster


def wants_a_certificate(port: int) -> bool:
    """Whether a port of loopback speaks TLS, and only with those who show a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=3) as plain,
            context.wrap_socket(plain) as secured,
        ):
            secured.recv(1)
    except ssl.SSLError as error:
        return "CERTIFICATE_REQUIRED" in str(error) or "HANDSHAKE_FAILURE" in str(error)
    except OSError:
        return False
    return False


@pytest.mark.slow
def test_every_socket_of_a_run_is_on_loopback_and_speaks_tls(launch: Launch) -> None:
    run = launch(
        "tiny",
        "steps=1000",
        "cluster.pools.train.workers=2",
        "cluster.tls.kind=temporary",
        embedded=True,
    )
    wait_for_step(run, 1)
    processes = [psutil.Process(run.process.pid), *run.children()]
    listening = {
        (connection.laddr.ip, connection.laddr.port, process.pid)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) > 8  # the dashboard, the scheduler, nannies and workers, the ranks
    assert {ip for ip, _, _ in listening} <= {"127.0.0.1", "::1"}, listening
    guarded = [port for _, port, _ in listening if wants_a_certificate(port)]
    assert len(guarded) >= 9  # scheduler, four nannies, four workers
    looked = subprocess.run(
        [sys.executable, "-m", "flows.inspect", run.files.run, "--json"],
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert looked.returncode == 0, looked.stderr
    seen = {one["name"]: one["status"] for one in json.loads(looked.stdout)["workers"]}
    assert sorted(seen) == ["cpu-0", "rollout-0", "train-0", "train-1"]
    assert all(status["pid"] in {process.pid for process in processes} for status in seen.values())
    live = read_live(run.files)
    assert live is not None
    files = [Path(path) for path in (live.certificates or {}).values()]
    assert [path.stat().st_mode & 0o77 for path in files] == [0, 0, 0]
    run.process.send_signal(signal.SIGTERM)
    code, out = run.end(timeout=30)
    assert code == 130, out
    assert "PRIVATE KEY" not in out
    assert not any(path.exists() for path in files)
