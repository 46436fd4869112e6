"""Calls on a worker: what the flow does while it waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, LocalCluster, get_worker

from engines.failures import ClusterLost, WorkerLost
from engines.workers import calls
from engines.workers.calls import PendingCall
from engines.workers.engine import CallResult
from engines.workers.transport import PUSHED_BYTES, CallWatch, PushedResults, Sender, push


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=4, processes=False, dashboard_address=None
        ) as one,
        Client(one) as client,
    ):
        yield client


def double(number: int) -> CallResult[int]:
    """As a worker's."""
    return CallResult(value=2 * number)


def test_slow_answers_of_the_scheduler_end_no_other_call(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask fetches the results of calls that end together in one request: none may cancel it."""
    (address,) = client.scheduler_info()["workers"]
    cluster: Any = SimpleNamespace(
        client=client,
        sender=Sender(client),
        pool_of=lambda address: "pool",
        table=SimpleNamespace(name_of=lambda address: "rollout-0"),
        check=lambda: None,
        count=lambda pool, result: None,
        watch=CallWatch(lambda: {address: "pool"}),
    )
    fetch = client._gather_remote

    async def slowly(*given: Any) -> Any:
        await asyncio.sleep(10 * calls.LOOK)
        return await fetch(*given)

    monkeypatch.setattr(calls, "LOOK", 0.1)
    monkeypatch.setattr(client, "_gather_remote", slowly)

    def call(number: int) -> int | None:
        pending = PendingCall(cluster, address, "double", double, number, slot=False)
        return pending.wait(60.0).value

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(call, range(8))) == [2 * number for number in range(8)]
    cluster.watch.close()


def test_a_call_that_meets_a_closed_client_is_a_lost_cluster(client: Client) -> None:
    """A run that is interrupted closes its client while some task is about to call a worker."""
    (address,) = client.scheduler_info()["workers"]
    cluster: Any = SimpleNamespace(
        client=client,
        sender=Sender(client),
        pool_of=lambda address: "pool",
        table=SimpleNamespace(name_of=lambda address: "rollout-0"),
        why_lost=ClusterLost,
    )
    client.close()
    with pytest.raises(ClusterLost, match="double could not be sent"):
        PendingCall(cluster, address, "double", double, 1, slot=False)


def pushing(topic: str, token: str, size: int) -> CallResult[bytes] | None:
    """As a worker's: a result of so many bytes."""
    return push(get_worker(), topic, token, CallResult(value=b"x" * size))


@pytest.fixture
def cluster(client: Client) -> Iterator[Any]:
    (address,) = client.scheduler_info()["workers"]
    made: Any = SimpleNamespace(
        client=client,
        sender=Sender(client),
        address=address,
        pool_of=lambda address: "pool",
        table=SimpleNamespace(name_of=lambda address: "rollout-0"),
        log_hint=lambda worker: "",
        check=lambda: None,
        count=lambda pool, result: None,
        watch=CallWatch(lambda: {address: "pool"}),
        pushed=PushedResults(client),
    )
    yield made
    made.watch.close()


def call_of(cluster: Any, token: str, topic: str, size: int) -> PendingCall[bytes]:
    return PendingCall(
        cluster, cluster.address, "push", pushing, topic, token, size,
        token=token, slot=False, pushed=True,
    )  # fmt: skip


def test_a_small_result_is_pushed_and_a_large_one_is_fetched(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    gather = cluster.client._gather_remote

    async def counted(*given: Any) -> Any:
        fetched.append(given)
        return await gather(*given)

    monkeypatch.setattr(cluster.client, "_gather_remote", counted)
    topic = cluster.pushed.topic
    for number in range(20):
        assert len(call_of(cluster, f"small-{number}", topic, 1000).wait(60.0).value or b"") == 1000
    assert not fetched
    assert (
        len(call_of(cluster, "large", topic, PUSHED_BYTES).wait(60.0).value or b"") == PUSHED_BYTES
    )
    assert fetched
    assert not cluster.pushed._came, "nothing is kept of calls that have ended"


def test_a_result_that_does_not_arrive_is_a_lost_worker_and_not_no_result(cluster: Any) -> None:
    call = call_of(cluster, "astray", "nobody listens here", 10)
    with pytest.raises(WorkerLost, match="the result that it pushed has not arrived"):
        call.wait(60.0)


def test_a_dropped_call_leaves_nothing_behind(cluster: Any) -> None:
    call = call_of(cluster, "dropped", cluster.pushed.topic, 10)
    call.drop()
    assert call_of(cluster, "next", cluster.pushed.topic, 10).wait(60.0)
    assert not cluster.pushed._came


def test_a_scheduler_that_goes_on_keeps_no_results(cluster: Any) -> None:
    topic = cluster.pushed.topic
    assert call_of(cluster, "told", topic, 1000).wait(60.0)
    assert cluster.client.get_events(topic)
    cluster.pushed.close(cluster.client, 10.0)
    assert not cluster.client.get_events(topic)
