"""Calls on a worker: what the flow does while it waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, LocalCluster

from engines.failures import ClusterLost
from engines.workers import calls
from engines.workers.call_watch import CallWatch
from engines.workers.calls import PendingCall


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=4, processes=False, dashboard_address=None
        ) as one,
        Client(one) as client,
    ):
        yield client


def test_slow_answers_of_the_scheduler_end_no_other_call(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask fetches the results of calls that end together in one request: none may cancel it."""
    (address,) = client.scheduler_info()["workers"]
    cluster: Any = SimpleNamespace(
        client=client,
        pool_of=lambda address: "pool",
        name_of=lambda address: "rollout-0",
        check=lambda: None,
        watch=CallWatch(lambda: {address: "pool"}),
    )
    fetch = client._gather_remote

    async def slowly(*given: Any) -> Any:
        await asyncio.sleep(10 * calls.LOOK)
        return await fetch(*given)

    monkeypatch.setattr(calls, "LOOK", 0.1)
    monkeypatch.setattr(client, "_gather_remote", slowly)

    def call(number: int) -> int:
        pending = PendingCall(cluster, address, "double", lambda x: 2 * x, number, slot=False)
        found: int = pending.wait(60.0)
        return found

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(call, range(8))) == [2 * number for number in range(8)]
    cluster.watch.close()


def test_a_call_that_meets_a_closed_client_is_a_lost_cluster(client: Client) -> None:
    """A run that is interrupted closes its client while some task is about to call a worker."""
    (address,) = client.scheduler_info()["workers"]
    cluster: Any = SimpleNamespace(
        client=client,
        pool_of=lambda address: "pool",
        name_of=lambda address: "rollout-0",
        why_lost=ClusterLost,
    )
    client.close()
    with pytest.raises(ClusterLost, match="double could not be sent"):
        PendingCall(cluster, address, "double", lambda x: 2 * x, 1, slot=False)
