"""What MLflow's page of a run does with what it hears."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from configs.storage import StoreConfig, TrackingConfig
from storage.tracking.connection import TrackingError
from storage.tracking.registry import RegisteredVersion
from tasks.reporting import mlflow_page
from tasks.reporting.mlflow_page import RunTracker, Write
from tasks.run.events import EnginesReady, Listeners, RunClosed, SnapshotStored, StepCommitted


class Writer:
    """What a page is asked for, in order; while `away` is set it does not answer."""

    link, last_step, model_name = "http://mlflow/run", 0, "tiny"

    def __init__(self, config: object, say: object) -> None:
        self.asked: list[str] = []
        self.away = threading.Event()

    def _hear(self, what: str) -> None:
        if self.away.is_set():
            raise TrackingError("MLflow is away.")
        self.asked.append(what)

    def call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(self, method.__name__)(*arguments, **named)

    def log_step(self, step: int, metrics: object, **_: object) -> None:
        self._hear(f"step {step}")

    def tag(self, name: str, value: str) -> None:
        self._hear(name)

    def register_version(self, version: int, **_: object) -> str:
        self._hear(f"version {version}")
        return str(version * 10)

    def registered_versions(self) -> list[RegisteredVersion]:
        return []

    def finish(self, status: str) -> None:
        self._hear(status)


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> RunTracker:
    monkeypatch.setattr(mlflow_page, "PageWriter", Writer)
    monkeypatch.setattr(mlflow_page, "numbers_of", lambda record: record.metrics)
    monkeypatch.setattr(mlflow_page, "marked", lambda metrics: "changed" if metrics else "")
    for name in ("version_tags", "newest_tags"):
        monkeypatch.setattr(mlflow_page, name, lambda commit: {})
    monkeypatch.setattr(mlflow_page, "evaluations_of", lambda files, version: [])
    tracking = TrackingConfig(uri="sqlite:///mlflow.db", traced_samples=0, system_metrics=0)
    store = SimpleNamespace(uri="file:///store", url=lambda key: f"file:///store/{key}")
    facts: Any = SimpleNamespace(
        config=SimpleNamespace(tracking=tracking, store=StoreConfig(keep_registered=2)),
        files=None,
        store=store,
    )
    return RunTracker(facts, print)


def record(step: int, metrics: dict[str, float] | None = None) -> Any:
    weights = SimpleNamespace(version=step, key=f"run/weights/v{step}", digest="d")
    return SimpleNamespace(
        step=step, metrics=metrics or {}, version_out=weights, committed_at=float(step)
    )


def committed(step: int, snapshot: bool, metrics: dict[str, float]) -> StepCommitted:
    return StepCommitted(
        record=record(step, metrics), metrics={}, scored=[], attempts=[], snapshot=snapshot
    )


def asked(tracker: RunTracker) -> list[str]:
    writer: Any = tracker._tracker
    found: list[str] = writer.asked
    return found


def test_a_version_is_registered_where_the_trainers_state_is_stored(tracker: RunTracker) -> None:
    listeners = Listeners()
    tracker.listen(listeners)
    listeners.tell(committed(1, False, {}))
    listeners.tell(committed(2, True, {"meaning/reward": 2.0}))
    listeners.tell(SnapshotStored(record=record(3)))
    assert tracker.registered == {2: None, 3: None}, "retention keeps what waits to be registered"
    assert asked(tracker) == [], "the page has not begun"
    tracker._queue.start(Write(what="page", do=lambda: None, first=True))
    assert tracker.model_name == "tiny"
    assert asked(tracker) == [
        "step 1", "refrain.meaning_changed.2", "step 2", "version 2", "version 3",
    ]  # fmt: skip
    assert tracker.registered == {2: "20", 3: "30"}


def test_no_step_waits_for_an_mlflow_that_is_away(
    tracker: RunTracker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlflow_page, "PATIENCE", 0.2)
    monkeypatch.setattr("tasks.reporting.mlflow_page.PAUSES", (0.02, 0.02))
    monkeypatch.setattr(
        "storage.tracking.connection.TrackingAddress.check_answers", lambda address: answers()
    )
    writer: Any = tracker._tracker
    writer.away.set()

    def answers() -> None:
        if writer.away.is_set():
            raise TrackingError("MLflow is away.")

    listeners = Listeners()
    tracker.listen(listeners)
    tracker._began = True
    tracker._queue.start(Write(what="page", do=lambda: writer.tag("begun", ""), first=True))
    for step in range(1, 4):
        listeners.tell(committed(step, False, {}))
    listeners.drain()
    assert asked(tracker) == []
    writer.away.clear()
    listeners.tell(RunClosed(error=None))
    assert asked(tracker) == ["begun", "step 1", "step 2", "step 3", "FINISHED"]
    assert capsys.readouterr().out.count("The run goes on") == 1


def test_retention_keeps_every_version_until_the_registry_has_been_asked(
    tracker: RunTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer: Any = tracker._tracker
    facts: Any = tracker._facts
    facts.files, facts.start = SimpleNamespace(versions=lambda: [0, 2, 4]), 0
    begun = threading.Event()
    writer.start = lambda tracked: begun.wait(10)
    writer.last_step, writer.registered = 4, lambda: {2: "1"}
    monkeypatch.setattr(mlflow_page, "tracked_run", lambda facts: None)
    tracker.engines_ready(EnginesReady(last=record(4), snapshot=False))
    assert tracker.registered == {0: None, 2: None, 4: None}
    begun.set()
    assert tracker.model_name == "tiny"
    assert tracker.registered == {2: "1"}


def test_what_the_registry_does_not_need_is_let_go_once_it_has_been_asked(
    tracker: RunTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer: Any = tracker._tracker
    facts: Any = tracker._facts
    facts.start = 0
    told: list[Any] = []
    aliases = {1: ("champion",)}
    writer.registered_versions = lambda: [
        RegisteredVersion(
            version=version, model="tiny", number="1", at=0.0, aliases=aliases.get(version, ())
        )
        for version in tracker.registered
    ]
    writer.tag_removed = told.append
    writer.start, writer.registered = lambda tracked: None, dict
    monkeypatch.setattr(mlflow_page, "tracked_run", lambda facts: None)
    tracker.engines_ready(EnginesReady(last=None, snapshot=False))
    for step in (1, 2, 3, 4):
        tracker.step_committed(committed(step, True, {}))
    assert tracker.model_name == "tiny"  # all has been written
    assert set(tracker.retained()) == {1, 3, 4}
    champions = {2}
    writer.let_go = lambda versions: {*versions} - champions
    assert set(tracker.let_go([0, 1, 2])) == {0, 1}, "one that was promoted meanwhile stays"
    champions.clear()
    assert set(tracker.let_go([0, 2])) == {0, 2}
    tracker.removed([2, 7])  # a version that was never registered among them
    assert tracker.model_name == "tiny"
    assert told == [[2]]


def test_a_resumed_run_ends_what_a_dead_process_had_begun_to_remove(
    tracker: RunTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 is gone without a word; 4 was to go, and is there: by today's settings it may stay."""
    writer: Any = tracker._tracker
    facts: Any = tracker._facts
    facts.files, facts.start = SimpleNamespace(versions=lambda: [0, 4, 6]), 0
    monkeypatch.setattr(mlflow_page, "is_there", lambda files, version: version in files.versions())
    writer.registered_versions = lambda: [
        RegisteredVersion(version=version, model="tiny", number="1", at=0.0, going=version < 6)
        for version in (2, 4, 6)
    ]
    gone: list[Any] = []
    back: list[Any] = []
    writer.tag_removed, writer.take_back = gone.append, back.append
    writer.start, writer.registered = lambda tracked: None, lambda: {4: "1", 6: "2"}
    writer.last_step = 6
    monkeypatch.setattr(mlflow_page, "tracked_run", lambda facts: None)
    tracker.engines_ready(EnginesReady(last=record(6), snapshot=False))
    assert tracker.model_name == "tiny"  # all has been written
    assert (gone, back) == ([[2]], [[4]])


@pytest.mark.parametrize("how", ["away", "hangs"])
def test_nothing_registered_is_removed_while_mlflow_does_not_answer(
    tracker: RunTracker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(mlflow_page, "LET_GO_PATIENCE", 0.3)
    released = threading.Event()

    def let_go(versions: object) -> object:
        if how == "away":
            raise TrackingError("MLflow is away.")
        released.wait(10)
        return versions

    writer: Any = tracker._tracker
    writer.let_go = let_go
    tracker._queue.start(Write(what="page", do=lambda: None, first=True))
    tracker._numbers, tracker._let_go = {2: "1", 3: "2"}, frozenset({2})
    assert set(tracker.let_go([1, 2])) == {1}
    assert set(tracker.retained()) == {2, 3}, "until the registry has been asked again"
    released.set()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (RunClosed(error=None), "FINISHED"),
        (RunClosed(error=RuntimeError("no worker")), "FAILED"),
        (RunClosed(error=RuntimeError("a wait was ended"), stopped=True), "KILLED"),
        (RunClosed(error=KeyboardInterrupt()), "KILLED"),
    ],
)
def test_a_run_that_a_person_stopped_is_no_failed_one(
    tracker: RunTracker, end: RunClosed, status: str
) -> None:
    listeners = Listeners()
    tracker.listen(listeners)
    writer: Any = tracker._tracker
    tracker._began = True
    tracker._queue.start(Write(what="page", do=lambda: writer.tag("begun", ""), first=True))
    listeners.tell(end)
    assert asked(tracker) == ["begun", status]
