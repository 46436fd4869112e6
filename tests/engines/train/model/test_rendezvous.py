"""Ranks that cannot meet are told which layer is stuck, within its bound."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from engines.processes.loopback import pin_to_loopback
from engines.train.model import rendezvous
from engines.train.model.rendezvous import RendezvousFailed, meet
from tests.engines.train.train_ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def half_way(rank: int, world: int, ports: list[int]) -> str:
    """Rank 1 comes to the store and stays there."""
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", ports[0], 2, False, timedelta(seconds=60))
        store.set("known/1", "none")
        time.sleep(12)
        return ""
    began = time.monotonic()
    with pytest.raises(RendezvousFailed) as caught:
        meet(0, 2, "127.0.0.1", ports[0], CPU, timeout=6.0, call_timeout=60.0)
    assert time.monotonic() - began < 30
    return str(caught.value)


@pytest.mark.slow
def test_gloo_is_named_when_it_is_stuck(pair: Ranks) -> None:
    text, _ = pair.run(half_way)
    assert "rendezvous is stuck in phase gloo (rank 0 of 2 at 127.0.0.1" in text
    assert "not done after 6 s" in text


def test_a_port_that_is_taken_is_the_stores_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousFailed, match=r"phase store \(rank 0 of 2"):
            meet(0, 2, "127.0.0.1", port, CPU, timeout=5.0, call_timeout=5.0)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    return monkeypatch


def pinned() -> list[str | None]:
    import os

    return [os.environ.get(f"{layer}_SOCKET_IFNAME") for layer in ("GLOO", "NCCL")]


def test_ranks_of_one_host_are_pinned_to_loopback(variables) -> None:
    assert pin_to_loopback("127.0.0.1")
    assert pinned() == ["lo", "lo"]


def test_ranks_on_several_hosts_are_not_pinned(variables) -> None:
    assert not pin_to_loopback("192.0.2.7")
    assert pinned() == [None, None]


def listening() -> set[tuple[str, int]]:
    """Addresses at which this process listens."""
    return {
        tuple(connection.laddr)
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_the_meeting_point_listens_on_its_own_address_only() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    before = listening()
    stores: dict[int, dist.Store] = {}

    def join(rank: int) -> None:
        stores[rank] = rendezvous._store(rank, 2, "127.0.0.1", port, 20.0)

    ranks = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert listening() - before == {("127.0.0.1", port)}
    stores[0].set("key", "value")
    stores[1].wait(["key"], timedelta(seconds=5))
    assert stores[1].get("key") == b"value"
