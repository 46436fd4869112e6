"""The service and its clients over HTTP; the gang is a fake that fails, is slow or has other weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from engines.failures import GangLost, StaleCall
from engines.models.tokens import ModelTokens
from engines.teachers import api
from engines.teachers.api import settings_of
from engines.teachers.client import (
    Address,
    TeacherAway,
    TeacherClient,
    TeacherFailed,
    TeacherRefused,
    probed,
    status_of,
)
from engines.teachers.service import Limits, TeacherService
from engines.train.contract import ColumnsResult, TrainEngine
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

KEY = "a-key-of-some-length"
TOKENS = ModelTokens(words={"<eos>": 0, "a": 1}, special={"<eos>": 0}, rows=8)


@dataclass
class FakeGang:
    """Answers with the lengths of what it is asked; its failures are taken one by one."""

    digest: str = "weights"
    formed: bool = False
    generation: int = 0
    seconds: float = 0.0
    failures: list[Exception] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)  # run, out_key

    def form(self, cancel: threading.Event | None = None) -> None:
        self.formed, self.generation = True, self.generation + 1

    def call(self, method: Any, call_id: Any, cancel: Any, **kwargs: Any) -> Any:
        if method is TrainEngine.tokens:
            return TOKENS
        if method is TrainEngine.digest:
            return f"{self.digest}-{kwargs['dtype']}"
        request = kwargs["request"]
        self.asked.append((call_id.run.rpartition("/")[2], request.out_key))
        time.sleep(self.seconds)
        if self.failures:
            self.formed = False
            raise self.failures.pop()
        lengths = request.batch.lengths(request.store, "response_ids")
        columns = {"teacher_logprobs": [np.zeros(n, np.float32) for n in lengths]}
        return ColumnsResult(batch=write_batch(request.store, request.out_key, columns))


@dataclass
class World:
    """A service that listens, and clients of it."""

    folder: Path
    gang: FakeGang
    port: int = 0
    clients: list[TeacherClient] = field(default_factory=list)
    services: list[tuple[TeacherService, uvicorn.Server, threading.Thread]] = field(
        default_factory=list
    )

    @property
    def store(self) -> Store:
        return Store(f"file://{self.folder}/store")

    @property
    def address(self) -> Address:
        return Address(name="tutor", url=f"http://127.0.0.1:{self.port}", key=KEY)

    def serve(self, places: int = 4, quota: int | None = None) -> None:
        limits = Limits(places=places, lease_seconds=3.0, tokens_per_minute=quota)
        service = TeacherService(
            self.gang,  # type: ignore[arg-type]
            {self.store.uri: self.store},
            limits,
            name="teacher",
            model="fake",
            positions=64,
        )
        service.start()
        settings = settings_of(api.app(service, KEY), "127.0.0.1", self.port)
        listening = settings.bind_socket()
        self.port = listening.getsockname()[1]
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        self.services.append((service, server, thread))

    def end(self) -> None:
        service, server, thread = self.services.pop()
        server.should_exit = True
        thread.join()
        service.close()

    def client(self, run: str = "run", **changed: Any) -> TeacherClient:
        facts = {
            "store": self.store,
            "run": run,
            "epoch": 1,
            "temperature": 1.0,
            "dtype": "float32",
            "digest": None,
            "patience": 20.0,
            "cancel": threading.Event(),
        }
        client = TeacherClient(changed.pop("address", self.address), **(facts | changed))
        self.clients.append(client)
        return client

    def attached(self, run: str = "run", **changed: Any) -> TeacherClient:
        client = self.client(run, **changed)
        client.attach(TOKENS)
        return client

    def samples(self, run: str = "run", lengths: tuple[int, ...] = (3, 5)) -> BatchRef:
        rows = [list(range(n)) for n in lengths]
        key = f"{run}/samples-{len(lengths)}-{max(lengths)}.safetensors"
        return write_batch(
            self.store, key, {"prompt_ids": [[1, 2]] * len(rows), "response_ids": rows}
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(api, "POLL", 0.2)
    monkeypatch.setattr("engines.teachers.client.PAUSE", 0.1)
    made = World(tmp_path, FakeGang())
    try:
        yield made
    finally:
        for client in made.clients:
            client.close()
        while made.services:
            made.end()


def test_scores_are_written_by_the_runs_keys_and_counted(world: World) -> None:
    world.gang.seconds = 0.5  # longer than a request waits
    world.serve()
    client = world.attached()
    made = client.teach(world.samples(), "run/teacher.safetensors", 0)
    assert made.objects == {"run/teacher.safetensors"}
    assert made.lengths(world.store, "teacher_logprobs").tolist() == [3, 5]
    assert client.digest(0, "float32") == "weights-float32"
    assert world.gang.asked == [("run", "run/teacher.safetensors")]
    (use,) = status_of(world.address).runs
    assert (use.run, use.calls, use.tokens, use.waiting) == ("run", 1, 12, 0)
    assert use.seconds >= 0.5
    used = client.used()
    assert used["tokens"] == 12 and used["seconds"] >= 0.5
    assert client.used() == {}
    client.close()
    assert status_of(world.address).runs == []


def test_runs_take_turns_whatever_one_of_them_has_waiting(world: World) -> None:
    world.gang.seconds = 0.05
    world.serve()
    large, small = world.attached("large"), world.attached("small")
    with ThreadPoolExecutor(24) as threads:
        many = [
            threads.submit(large.teach, world.samples("large"), f"large/{n}.safetensors", 0)
            for n in range(20)
        ]
        while len(world.gang.asked) < 3:
            time.sleep(0.01)
        few = [
            threads.submit(small.teach, world.samples("small"), f"small/{n}.safetensors", 0)
            for n in range(3)
        ]
        assert all(one.result() for one in [*few, *many])
    runs = [run for run, _ in world.gang.asked]
    last = max(number for number, run in enumerate(runs) if run == "small")
    assert runs[:last].count("large") <= 12  # not all 20


def test_a_service_that_was_killed_is_asked_again_and_knows_the_run_no_more(world: World) -> None:
    world.serve()
    client = world.attached()
    world.end()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.teach, world.samples(), "run/teacher.safetensors", 0)
        time.sleep(0.5)
        assert not answer.done()
        world.serve()
        assert answer.result(10).lengths(world.store, "teacher_logprobs").tolist() == [3, 5]
    assert len(status_of(world.address).runs) == 1


def test_a_run_without_a_service_for_too_long_is_told(world: World) -> None:
    world.serve()
    client = world.attached(patience=0.3)
    world.end()
    with pytest.raises(
        TeacherAway, match="The teacher tutor at http://127.0.0.1:.* cannot be reached"
    ):
        client.teach(world.samples(), "run/teacher.safetensors", 0)


def test_a_dead_worker_is_the_runs_to_try_again_and_a_bad_call_is_not(world: World) -> None:
    world.serve()
    client = world.attached()
    world.gang.failures = [GangLost(0, "teacher-0", "it died")]
    with pytest.raises(TeacherFailed, match="it died"):
        client.teach(world.samples(), "run/teacher.safetensors", 0)
    assert client.teach(world.samples(), "run/teacher.safetensors", 0)
    assert world.gang.generation == 2
    world.gang.failures = [ZeroDivisionError("of a call that fails again")]
    with pytest.raises(TeacherRefused, match="ZeroDivisionError: of a call that fails again"):
        client.teach(world.samples(), "run/teacher.safetensors", 0)


def test_a_bad_question_does_not_reach_the_gang(world: World) -> None:
    world.serve()
    client = world.attached()
    gone = world.samples()
    world.store.delete(sorted(gone.objects))
    asked: list[tuple[Callable[[], BatchRef], str]] = [
        (lambda: client.teach(gone, "run/t.safetensors", 0), "the samples cannot be read"),
        (lambda: client.teach(world.samples(lengths=(70,)), "run/t.safetensors", 0), "72 tokens, and it reads 64"),
        (lambda: client.teach(world.samples(), "other/t.safetensors", 0), "no key of the run run"),
        (lambda: client.teach(world.samples(), "run/t.safetensors", 8), "top_k = 8, and it has 8 words"),
    ]  # fmt: skip
    for ask, said in asked:
        with pytest.raises(TeacherRefused, match="^[^\n]+$") as error:
            ask()
        assert said in str(error.value)
    assert world.gang.asked == []


def test_a_run_that_does_not_fit_is_one_sentence(world: World, tmp_path: Path) -> None:
    world.serve()
    other = ModelTokens(words={"<eos>": 0, "b": 1}, special={"<eos>": 0}, rows=8)
    elsewhere = Store(f"file://{tmp_path}/elsewhere")
    wrong = Address(name="tutor", url=world.address.url, key="another-key")
    asked: list[tuple[Callable[[], object], str]] = [
        (lambda: world.client().attach(other), "the token 'a' has the id 1 of the teacher's"),
        (lambda: world.client().attach(None), "The student has no tokenizer.json"),
        (lambda: world.client(digest="0123").attach(TOKENS), "holds the weights weights-float32 in float32, and teachers.tutor.digest = 0123"),
        (lambda: world.client(store=elsewhere).attach(TOKENS), "start it with other_stores=[file://"),
        (lambda: world.client(address=wrong).attach(TOKENS), "the key is not the service's; set the variable"),
    ]  # fmt: skip
    for ask, said in asked:
        with pytest.raises(ValueError, match="^[^\n]+$") as error:
            ask()
        assert said in str(error.value)
        assert "another-key" not in str(error.value)
    assert status_of(world.address).runs == []


def test_a_store_that_is_another_place_for_the_service_is_told(
    world: World, tmp_path: Path
) -> None:
    world.serve()
    service = world.services[0][0]
    service._stores = {world.store.uri: Store(f"file://{tmp_path}/not-the-same")}  # type: ignore[misc]
    with pytest.raises(TeacherRefused, match="does not see what this run has just written"):
        probed(world.address, world.store, "float32")


def test_other_weights_in_the_middle_of_a_run_are_refused(world: World) -> None:
    world.serve()
    client = world.attached()
    world.end()
    world.gang.digest, world.gang.formed = "others", False
    world.serve()
    with pytest.raises(
        TeacherRefused, match="it holds the weights others-float32, and this run is"
    ):
        client.teach(world.samples(), "run/t.safetensors", 0)


def test_a_run_waits_for_a_place_and_a_flow_that_was_replaced_is_told(world: World) -> None:
    world.serve(places=1)
    first = world.attached("first")
    with pytest.raises(TeacherAway, match=r"places = 1, all taken by other runs \(first\)"):
        world.attached("second", patience=0.3)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(world.attached, "second")
        time.sleep(0.3)
        assert not waits.done()
        first.close()
        second = waits.result(10)
    world.attached("second", epoch=2)
    with pytest.raises(StaleCall, match="a flow with epoch 2 has taken the run second over"):
        second.teach(world.samples("second"), "second/t.safetensors", 0)


def test_a_quota_makes_wait(world: World) -> None:
    world.serve(quota=1200)
    client, samples = world.attached(), world.samples(lengths=(60,) * 10)
    for number in range(2):  # of 620 tokens each: what a minute earns may come at once
        client.teach(samples, f"run/{number}.safetensors", 0)
    assert client.used()["queue_seconds"] < 0.5
    client.teach(world.samples(), "run/last.safetensors", 0)
    assert 1.5 < client.used()["queue_seconds"] < 10
