"""Calls that go to the scheduler together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, get_worker
from distributed.client import ClosedClientError

from engines.clusters.opening import stop_timers
from engines.workers import transport
from engines.workers.transport import Outgoing, Sender

WAIT = 30.0  # seconds


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=4, processes=False, dashboard_address=None
        ) as one,
        Client(one) as client,
    ):
        yield client


def where(given: object) -> tuple[str, object]:
    """As a worker's: its address, and what it was given."""
    return get_worker().address, given


class Calls:
    """Tasks that are sent, and the graphs in which they went."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        self.sender = Sender(client)
        self.graphs: list[set[str]] = []
        send = client._send_to_scheduler

        def counted(message: dict[str, Any]) -> None:
            if message.get("op") == "update-graph":
                self.graphs.append(message["keys"])
            send(message)

        monkeypatch.setattr(client, "_send_to_scheduler", counted)

    def send(
        self, key: str, worker: int, given: object, function: Callable[..., Any] = where
    ) -> tuple[Outgoing, threading.Event]:
        """A task, and what is set once it has been sent or could not be."""
        settled = threading.Event()
        call = Outgoing(
            function=function,
            args=(given,),
            key=key,
            address=self.workers[worker],
            resources={},
            settled=settled.set,
        )
        self.sender.send(call)
        return call, settled


@pytest.fixture
def calls(client: Client, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(client, monkeypatch)


def test_calls_of_one_moment_go_together_each_to_its_worker(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "GATHER", 0.5)
    first, settled = calls.send("first", 0, "a")
    assert settled.wait(WAIT)
    sent = [calls.send(f"call-{number}", number % 3, number) for number in range(30)]
    for number, (call, settled) in enumerate(sent):
        assert settled.wait(WAIT) and call.future is not None
        assert call.future.result(WAIT) == (calls.workers[number % 3], number)
    assert first.future is not None and first.future.result(WAIT) == (calls.workers[0], "a")
    assert calls.graphs == [{"first"}, {f"call-{number}" for number in range(30)}]


def test_a_message_has_so_many_calls_and_no_more(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "GATHER", 0.5)
    monkeypatch.setattr(transport, "CALLS_TOGETHER", 4)
    assert calls.send("first", 0, 0)[1].wait(WAIT)
    sent = [calls.send(f"call-{number}", 0, number) for number in range(10)]
    assert all(settled.wait(WAIT) for _, settled in sent)
    assert sorted(map(len, calls.graphs)) == [1, 2, 4, 4]


def test_one_that_cannot_be_sent_keeps_back_no_other(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "GATHER", 0.5)
    assert calls.send("first", 0, 0)[1].wait(WAIT)
    good, good_settled = calls.send("good", 1, "a")
    bad, bad_settled = calls.send("bad", 1, threading.Lock())
    assert good_settled.wait(WAIT) and bad_settled.wait(WAIT)
    assert good.future is not None and good.future.result(WAIT)[1] == "a"
    assert bad.future is None and "Could not serialize" in str(bad.error)


def test_one_that_is_dropped_before_it_was_sent_never_goes(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "GATHER", 0.5)
    assert calls.send("first", 0, 0)[1].wait(WAIT)
    dropped, _ = calls.send("dropped", 1, "a")
    _, settled = calls.send("kept", 1, "b")
    calls.sender.drop(dropped)
    assert settled.wait(WAIT)
    assert calls.graphs == [{"first"}, {"kept"}]


def test_the_only_one_that_waits_is_dropped_and_the_next_is_sent(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "GATHER", 0.3)
    assert calls.send("first", 0, 0)[1].wait(WAIT)
    calls.sender.drop(calls.send("dropped", 1, "a")[0])
    call, settled = calls.send("next", 1, "b")
    assert settled.wait(WAIT)
    assert call.future is not None and call.future.result(WAIT)[1] == "b"


def test_a_client_that_closes_before_it_sends_says_so(
    client: Client, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(message: dict[str, Any]) -> None:
        raise ClosedClientError("closed")

    monkeypatch.setattr(client, "_send_to_scheduler", closed)
    call, settled = calls.send("late", 0, "a")
    assert settled.wait(WAIT) and isinstance(call.error, ClosedClientError)
    monkeypatch.undo()
    client.close()
    with pytest.raises(ClosedClientError, match="has been closed"):
        calls.send("later", 0, "a")


def test_a_quiet_client_says_nothing_by_itself(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Dask's intervals of seconds cut short, it would speak dozens of times."""
    said: list[str] = []

    def counted(other: Client) -> None:
        said.append("heartbeat")

    async def asked(other: Client, n_workers: int = 0) -> None:
        said.append("identity")
        await ask(other, n_workers)

    ask = Client._update_scheduler_info
    monkeypatch.setattr(Client, "_heartbeat", counted)
    monkeypatch.setattr(Client, "_update_scheduler_info", asked)
    with (
        dask.config.set(
            {
                "distributed.client.heartbeat": "10ms",
                "distributed.client.scheduler-info-interval": "10ms",
            }
        ),
        Client(client.scheduler.address, set_as_default=False) as other,
    ):
        deadline = time.monotonic() + WAIT
        while not {"heartbeat", "identity"} <= {*said[1:]} and time.monotonic() < deadline:
            time.sleep(0.01)
        assert {"heartbeat", "identity"} <= {*said[1:]}, (
            "the setting has no effect, so that nothing below would tell"
        )
        stop_timers(other)
        other.submit(abs, -1).result(WAIT)  # the loop has stopped them before it sends this
        said.clear()
        time.sleep(0.3)
        assert other.submit(abs, -1, pure=False).result(WAIT) == 1
        assert said == []
