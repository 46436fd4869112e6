"""Who hears what a run says, when, and what becomes of a listener that fails."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from storage.objects.errors import StoreUnavailable
from tasks.run.events import Listeners, Note, SnapshotStored


def committed(step: int) -> SnapshotStored:
    record: Any = SimpleNamespace(step=step)
    return SnapshotStored(record=record)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    monkeypatch.setattr("tasks.run.events.get_run_logger", lambda: logging.getLogger("events"))
    return caplog


def test_each_hears_in_order_what_it_listens_to() -> None:
    heard: list[str] = []
    listeners = Listeners()
    listeners.on(Note, lambda event: heard.append(f"first {event.text}"))
    listeners.on(Note, lambda event: heard.append(f"second {event.text}"))
    listeners.later(SnapshotStored, lambda event: heard.append("never"))
    listeners.tell(Note(text="a"))
    assert heard == ["first a", "second a"]


def test_the_run_goes_on_while_a_commit_is_told() -> None:
    went_on, heard = threading.Event(), list[object]()
    listeners = Listeners()
    listeners.on(SnapshotStored, lambda event: heard.append("at once"))
    listeners.later(SnapshotStored, lambda event: heard.append(went_on.wait(20)))
    listeners.later(SnapshotStored, lambda event: heard.append("then"))
    listeners.tell(committed(1), last=lambda: heard.append("last"))
    assert heard == ["at once"]
    went_on.set()
    listeners.drain()
    assert heard == ["at once", True, "then", "last"]
    listeners.stop()


def test_a_store_that_is_away_after_a_commit_is_a_warning(warnings: Any) -> None:
    """And nothing is removed: what has to stay may be known only once all have heard."""
    listeners, done = Listeners(), list[str]()

    def away(event: SnapshotStored) -> None:
        raise StoreUnavailable("list s3://bucket/run failed 6 times")

    listeners.later(SnapshotStored, away)
    listeners.tell(committed(4), last=lambda: done.append("tidied"))
    listeners.drain()
    listeners.tell(committed(5))
    listeners.drain()
    assert done == []
    assert warnings.messages[0] == (
        "Step 4 is committed; showing it and tidying up after it did not go to the end: "
        "list s3://bucket/run failed 6 times"
    )


def test_a_store_that_is_away_while_it_is_tidied_is_a_warning_too(warnings: Any) -> None:
    listeners = Listeners()

    def away() -> None:
        raise StoreUnavailable("delete from s3://bucket/run failed 6 times")

    listeners.tell(committed(4), last=away)
    listeners.drain()
    listeners.tell(committed(5))
    listeners.drain()
    assert "delete from s3://bucket/run failed 6 times" in warnings.messages[0]


def test_what_fails_in_the_background_is_raised_at_the_next_commit() -> None:
    listeners = Listeners()

    def refuse(event: SnapshotStored) -> None:
        raise RuntimeError("MLflow says no")

    listeners.later(SnapshotStored, refuse)
    listeners.tell(committed(1))
    with pytest.raises(RuntimeError, match="MLflow says no"):
        listeners.drain()
    with pytest.raises(RuntimeError, match="MLflow says no"):
        listeners.tell(committed(2))


def test_what_fails_at_once_the_teller_gets() -> None:
    listeners = Listeners()

    def refuse(event: Note) -> None:
        raise ValueError("the port is taken")

    listeners.on(Note, refuse)
    with pytest.raises(ValueError, match="taken"):
        listeners.tell(Note(text="a"))
