"""What a run opens to the network: nothing. And TLS between its processes."""

from __future__ import annotations

import signal

import psutil
import pytest
from distributed import Client

from tests.flows.conftest import Launch
from tests.flows.test_grpo import wait_for_step

pytestmark = pytest.mark.cluster


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
    refused = 0
    for _, port, _ in listening:
        try:
            Client(f"tcp://127.0.0.1:{port}", timeout=1, set_as_default=False).close()
        except (OSError, TimeoutError, ValueError):
            refused += 1
    assert refused == len(listening)  # no Dask port lets in one who has no certificate
    run.process.send_signal(signal.SIGTERM)
    code, out = run.end(timeout=30)
    assert code == 130, out
    assert "PRIVATE KEY" not in out
