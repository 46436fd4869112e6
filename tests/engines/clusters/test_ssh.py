"""Workers on a machine behind a real SSH server."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters import ssh as ssh_cluster
from engines.clusters.opening import open_cluster
from engines.workers import calls
from tests import sshd
from tests.engines.conftest import left_after, one_pool_roles
from tests.engines.workers.dummies import dummy, request
from tests.sshd import Sshd, running_sshd

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    if missing := sshd.missing():
        pytest.skip(f"no {', '.join(missing)} (apt install openssh-client openssh-server)")
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


def config(server: Sshd, **ssh: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "kind": "ssh",
            "host": "127.0.0.1",
            "ssh": {
                "hosts": [server.host],
                "options": server.options,
                "python": sys.executable,
                "folder": str(ROOT),
                **ssh,
            },
            "pools": {"pair": PoolConfig(workers=2), "solo": PoolConfig(slots=1)},
            "roles": one_pool_roles("pair"),
        }
    )


def environ(cluster, address: str, name: str) -> str | None:
    calls.build(cluster, address, "role", dummy(), deadline=60)
    return calls.submit(cluster, address, request("environ", name=name), deadline=60)


def test_workers_run_there_and_end_with_the_connection(
    server: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_cluster, "AGAIN_AFTER", 0.5)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    monkeypatch.setenv("REFRAIN_UNRELATED", "stays here")
    with open_cluster(config(server)) as cluster:
        assert list(cluster.workers("pair")) == ["pair-0", "pair-1"]
        address = cluster.workers("pair")["pair-0"]
        assert address.startswith("tls://127.0.0.1:")
        assert environ(cluster, address, "AWS_SECRET_ACCESS_KEY") == "planted-secret"
        assert environ(cluster, address, "REFRAIN_UNRELATED") is None
        assert environ(cluster, address, "SSH_CONNECTION") is not None
        for process in psutil.process_iter(["cmdline"]):
            assert "planted-secret" not in " ".join(process.info["cmdline"] or [])
        pids = [
            calls.status_of(cluster, one).pid
            for pool in ("pair", "solo")
            for one in cluster.workers(pool).values()
        ]
        (connection,) = cluster._remote._nodes.values()
        os.kill(connection.pid, 9)
        assert left_after(10, pids) == []
        end = time.monotonic() + 40
        while (back := cluster.workers("pair").get("pair-0", address)) == address:
            assert time.monotonic() < end, "pair-0 did not come back"
            time.sleep(0.2)
        pids = [calls.status_of(cluster, back).pid]
    assert left_after(5, pids) == []


def test_a_machine_that_cannot_be_used_is_one_sentence(server: Sshd) -> None:
    with pytest.raises(ValueError, match=r"cannot be used: .*Permission denied"):
        open_cluster(config(server, hosts=["nobody@127.0.0.1"]))
    with pytest.raises(ValueError, match="Refrain in cluster.ssh.python"):
        open_cluster(config(server, python="/no/such/python"))
