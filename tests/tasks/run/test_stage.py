"""What every piece of a step's work has: place, mark, tries and call."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.failures import WorkerLost
from engines.workers.devices import DeviceTime
from engines.workers.engine import CallId, Engine
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.run.attempts import Attempt, AttemptLog
from tasks.run.stage import Stage


class Adder(Engine):
    """A contract."""

    @abstractmethod
    def add(self, one: int, other: int) -> int:
        """Two numbers."""


class Pool:
    """Notes what it is asked; `lost`: calls that end with their worker."""

    def __init__(self, lost: int = 0) -> None:
        self.lost = lost
        self.asked: list[tuple[str, str]] = []

    def call(self, method: Any, call_id: CallId, assignment: Any, **arguments: int) -> int:
        assignment.worker = "cpu-0"
        self.asked.append((method.__name__, call_id.call))
        if len(self.asked) <= self.lost:
            raise WorkerLost("cpu-0", "killed")
        return sum(arguments.values())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(
        Attempt, "log", lambda attempt: None
    )  # into a task's, of which there is none
    return SimpleNamespace(
        name="r",
        files=RunStore(Store(str(tmp_path / "store")), "r"),
        attempts=AttemptLog(),
        tell=lambda event: None,
        device_time=DeviceTime(),
        call_id=lambda step, call: CallId(run="r", epoch=1, step=step, call=call),
    )


def test_results_lie_where_those_of_older_runs_do(run: Any) -> None:
    def place(**of: Any) -> str:
        return Stage(run=run, step=3, name="reward", key="k", **of).out_key

    assert place() == "r/steps/000003/reward/1-k.safetensors"
    assert place(shard=2) == "r/steps/000003/reward/2-k.safetensors"
    assert place(shard=2, part="tutor") == "r/steps/000003/reward/2-tutor-k.safetensors"
    assert place(part="7") == "r/steps/000003/reward/7-k.safetensors"


def test_a_call_is_a_try_on_record_whether_it_fails_or_not(run: Any) -> None:
    pool: Any = Pool(lost=1)
    stage = Stage(run=run, step=1, name="sum", key="k", shard=2)
    with pytest.raises(WorkerLost):
        stage.call(pool, Adder.add, one=1, other=2)
    assert stage.call(pool, Adder.add, one=1, other=2) == 3
    # One call of the same name: a worker that has its result does not make it again.
    assert pool.asked == [("add", f"add-{stage.out_key}")] * 2
    tries = run.attempts.of(1)
    assert [(one.stage, one.shard, one.assignment.worker) for one in tries] == [
        ("sum", 2, "cpu-0")
    ] * 2
    assert tries[0].error.startswith("WorkerLost") and not tries[1].error


def test_of_two_attempts_the_first_record_stands(run: Any) -> None:
    stage = Stage(run=run, step=1, name="sum", key="k")
    assert stage.finished() is None
    assert stage.finish({"sum": 3}) == {"sum": 3}
    assert stage.finish({"sum": 4}) == {"sum": 3} == stage.finished()
    assert Stage(run=run, step=1, name="sum", key="other").finished() is None
