"""What a run keeps of its data at its end, and how a flow ends that is cancelled on the dashboard."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from prefect.states import State

from configs.data import FileSource
from engines.data.contract import Scorer
from engines.failures import ClusterLost, WorkerLost
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource
from tasks.run import life_cycle
from tasks.run.roles import SCORER


class Workers:
    """Three workers that have the data; the call for the rows from `fails` on loses its worker."""

    def __init__(self, source: PromptSource, fails: int | None = None) -> None:
        self.source, self.fails = source, fails
        self.asked: list[tuple[int, int]] = []
        self.lock = threading.Lock()

    def live(self) -> dict[str, str]:
        return {name: name for name in "abc"}

    def call(self, method: object, call_id: str, *, start: int, stop: int) -> np.ndarray:
        with self.lock:
            self.asked.append((start, stop))
        assert method is Scorer.row_digests
        if start == self.fails:
            raise WorkerLost("a", "it was killed")
        return self.source.row_digests(range(start, stop))


def run_of(source: PromptSource, workers: Workers) -> Any:
    return SimpleNamespace(
        source=source,
        after=9,
        engines={SCORER: workers},
        call_id=lambda step, call: f"{step}-{call}",
    )


@pytest.fixture
def source(tmp_path: Path) -> PromptSource:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": str(n)}) + "\n" for n in range(23)))
    return open_source(FileSource(path=str(path)))


def test_few_rows_are_digested_here(source: PromptSource) -> None:
    workers = Workers(source)
    assert len(life_cycle.row_digests(run_of(source, workers))) == 23
    assert workers.asked == []


@pytest.mark.parametrize("fails", [None, 10])
def test_many_rows_are_digested_by_the_workers(
    source: PromptSource, monkeypatch: pytest.MonkeyPatch, fails: int | None
) -> None:
    monkeypatch.setattr(life_cycle, "ROWS_AT_ONCE", 10)
    workers = Workers(source, fails)
    found = life_cycle.row_digests(run_of(source, workers))
    np.testing.assert_array_equal(found, source.row_digests())
    assert found.dtype == np.uint64
    assert sorted(workers.asked) == [(0, 10), (10, 20), (20, 23)]


def test_they_are_digested_here_once_the_engines_are_closed(
    source: PromptSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(Workers):
        def live(self) -> dict[str, str]:
            raise ClusterLost("the cluster has been closed")

    monkeypatch.setattr(life_cycle, "ROWS_AT_ONCE", 10)
    workers = Closed(source)
    assert len(life_cycle.row_digests(run_of(source, workers))) == 23
    assert workers.asked == []


@pytest.mark.parametrize(
    ("state", "body", "found"),
    [
        ("CANCELLING", "waits", "CANCELLED"),
        ("CANCELLING", "ends", "all"),
        ("RUNNING", "fails", ClusterLost),
    ],
)
def test_a_flow_whose_cancel_the_run_saw_by_itself_ends_as_cancelled(
    monkeypatch: pytest.MonkeyPatch, state: str, body: str, found: str | type[Exception]
) -> None:
    """A body that had ended by then has what it has, and one that failed by itself has failed."""
    waits = threading.Event()
    client = SimpleNamespace(read_flow_run=lambda _: SimpleNamespace(state=State(type=state)))
    monkeypatch.setattr(life_cycle, "get_client", lambda **_: contextlib.nullcontext(client))
    monkeypatch.setattr(life_cycle, "ASK_EVERY", 0.01)

    def flow() -> str:
        with life_cycle.dashboard_ends(waits, uuid4()):
            if body != "fails":
                assert waits.wait(30)
            if body != "ends":
                raise ClusterLost("the cluster has been closed")
            return "all"

    if isinstance(found, str):
        ended = life_cycle.or_cancelled(flow)
        assert (ended if isinstance(ended, str) else ended.type.value) == found
    else:
        with pytest.raises(found):
            life_cycle.or_cancelled(flow)
