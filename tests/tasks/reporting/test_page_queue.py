"""Writes to an MLflow that is away, refuses, or comes back; no step waits for any of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from storage.tracking.connection import TrackerUnusable, TrackingAddress, TrackingError
from storage.tracking.machine_samples import MachineSample
from tasks.reporting import mlflow_page
from tasks.reporting.mlflow_page import MachineWatch, PageQueue, Write
from tests.ports import free_port

FILE = TrackingAddress.of("sqlite:///mlflow.db")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_page, "PAUSES", (0.05, 0.05))
    monkeypatch.setattr(mlflow_page, "LOOK", 0.1)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def queue(told: list[str]) -> Iterator[PageQueue]:
    made = PageQueue(FILE, told.append)
    yield made
    made.close(0.0)


def begin(queue: PageQueue, do: Callable[[], object] = lambda: None) -> None:
    queue.start(Write(what="The run's page", do=do, first=True))


def test_writes_are_made_in_order_and_who_asks_gets_the_answer(
    queue: PageQueue, told: list[str]
) -> None:
    written: list[str] = []
    queue.add("b", lambda: written.append("b"))  # before the page has begun
    begin(queue, lambda: written.append("a"))
    assert queue.ask("c", lambda: [*written, "c"]) == ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError):
        queue.ask("d", lambda: 1 / 0)
    queue.add("e", lambda: written.append("e"))
    queue.close(10.0)
    assert written == ["a", "b", "e"]
    assert not told


def test_what_is_refused_is_left_out_and_told_and_the_rest_is_written(
    queue: PageQueue, told: list[str]
) -> None:
    tries: list[str] = []

    def refused() -> None:
        tries.append("one")
        raise TrackingError("no such tag")

    begin(queue)
    queue.add("The tag x", refused)
    assert queue.ask("more", lambda: "yes") == "yes"
    assert len(tries) == mlflow_page.TRIES
    assert told == ["The tag x is not in MLflow: no such tag"]


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_a_server_that_is_away_is_told_once_and_waited_for_by_nobody(told: list[str]) -> None:
    address = TrackingAddress.of(f"http://127.0.0.1:{free_port()}")
    queue, written = PageQueue(address, told.append), list[str]()

    def write(what: str) -> None:
        address.check_answers()
        written.append(what)

    begin(queue, lambda: write("start"))
    began = time.monotonic()
    for step in range(5):
        queue.add(f"Step {step}", lambda step=step: write(f"step {step}"))  # type: ignore[misc]
    assert time.monotonic() - began < 1, "no step waits"
    while not told:
        time.sleep(0.05)
    time.sleep(0.3)
    assert len(told) == 1 and "does not answer" in told[0] and "The run goes on" in told[0]
    place = ("127.0.0.1", int(address.uri.rpartition(":")[2]))
    with HTTPServer(place, _Healthy) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever, 0.05)
        queue.close(10.0)
        server.shutdown()
    assert written == ["start", *(f"step {step}" for step in range(5))]
    assert len(told) == 2 and "answers again" in told[1]


def test_a_run_that_ends_waits_for_a_server_that_is_away_so_long_and_no_longer(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_page, "ASKED", 0.3)
    address = TrackingAddress.of(f"http://127.0.0.1:{free_port()}")
    queue = PageQueue(address, told.append)
    begin(queue, address.check_answers)
    queue.add("Step 1", lambda: None)
    with pytest.raises(TrackingError, match="The name of the model is not in MLflow: The MLflow"):
        queue.ask("The name of the model", lambda: "tiny")
    queue.close(0.3)
    assert "has not heard of all (2 writes are left)" in told[-1]
    assert "written when the run goes on" in told[-1]


def test_a_run_that_ends_waits_for_a_slow_tracker_so_long_and_no_longer(
    queue: PageQueue, told: list[str]
) -> None:
    begin(queue)
    for step in range(200):
        queue.add(f"Step {step}", lambda: time.sleep(0.05))
    began = time.monotonic()
    queue.close(10.0, most=0.5)
    assert time.monotonic() - began < 5
    assert "writes are left): it took longer than 0.5 s. The store has all of it" in told[-1]


def test_a_tracker_that_cannot_be_used_is_told_once_and_never_asked_again(
    queue: PageQueue, told: list[str]
) -> None:
    asked: list[str] = []

    def unusable() -> None:
        asked.append("start")
        raise TrackerUnusable("MLflow takes no run: no key.")

    queue.add("Step 1", lambda: asked.append("step 1"))
    begin(queue, unusable)
    while not told:
        time.sleep(0.02)
    queue.add("Step 2", lambda: asked.append("step 2"))
    queue.close(10.0)
    assert asked == ["start"]
    assert told == ["MLflow takes no run: no key. The run goes on without MLflow."]


def test_machines_are_looked_at_and_samples_wait_for_mlflow(queue: PageQueue) -> None:
    looks, logged, away = iter(range(1000)), list[MachineSample](), [True]

    def machines() -> list[MachineSample]:
        return [MachineSample(host="b", at=float(next(looks)), metrics={"cpu": 1.0})]

    def log(samples: list[MachineSample]) -> None:
        if away:
            raise TrackingError("away")
        logged.extend(samples)

    begin(queue)
    watch = MachineWatch(machines, log, queue, 0.02)  # type: ignore[arg-type]
    time.sleep(0.2)
    away.clear()
    until = time.monotonic() + 20
    while len(logged) < 20:
        assert time.monotonic() < until
        time.sleep(0.02)
    watch.stop()
    assert [one.at for one in logged] == [float(n) for n in range(len(logged))]
