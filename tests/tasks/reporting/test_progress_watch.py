"""What a run says while its workers and engines start, and what its store is told meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from engines.workers.engine import RunningCall
from storage.objects.errors import StoreUnavailable
from storage.objects.store import Store
from storage.runs.live import Progress, read_progress
from storage.runs.run_store import RunStore
from tasks.reporting import progress
from tasks.reporting.progress import ProgressTracker, ProgressWatch
from tasks.reporting.terminal import Terminal
from tasks.run.attempts import Attempt
from tasks.run.events import (
    AttemptBegan,
    EnginesReady,
    EngineStarted,
    Listeners,
    RunBegan,
    RunClosing,
    StepBegan,
    WorkersAsked,
)
from tasks.run.machinery import Work


class Clock:
    """Ten seconds pass between two looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def listening(folder: Path, terminal: Terminal) -> tuple[Listeners, ProgressTracker, RunStore]:
    listeners, files = Listeners(), RunStore(Store(str(folder / "store")), "r")
    tracker = ProgressTracker(9, epoch=4)
    tracker.listen(listeners)
    ProgressWatch(terminal, tracker, files, clock=Clock(), look=0.001).listen(listeners)
    return listeners, tracker, files


def to_nobody() -> Terminal:
    return Terminal(Console(file=StringIO(), width=400))


def began(at_work: Callable[[], Work]) -> RunBegan:
    return RunBegan(
        steps=9, head=0, fresh=0, last=None, at_work=at_work, look=lambda: None, machines=list
    )


def seen(files: RunStore, right: Callable[[Progress], bool]) -> Progress:
    """What the store is told, as soon as it is right."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        found = read_progress(files)
        if found is not None and right(found):
            return found
        time.sleep(0.005)
    raise AssertionError(read_progress(files))


def test_without_a_terminal_it_says_now_and_then_what_is_waited_for(tmp_path: Path) -> None:
    out, asked = StringIO(), threading.Semaphore(0)
    listeners, _, _ = listening(tmp_path, Terminal(Console(file=out, width=400)))
    answers = [
        {},
        {"rollout-0": "vLLM: 3523536 bytes", "train-0": "rank 0 loads the model's files"},
        {"rollout-0": "vLLM: 3523536 bytes", "train-0": "rank 0 loads the model's files"},
    ]

    def starts() -> dict[str, str]:
        asked.release()
        return answers.pop(0) if answers else {}

    listeners.tell(WorkersAsked(starts=starts))
    for _ in range(4):
        assert asked.acquire(timeout=10)
    listeners.tell(EngineStarted(waiting=("rollout",)))
    for _ in range(4):
        assert asked.acquire(timeout=10)
    listeners.tell(EnginesReady(last=None, snapshot=False))
    listeners.tell(RunClosing())
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("Starting ")
    assert lines[0].endswith(", for 20 s"), "not before it takes a while"
    assert any(
        line.startswith(
            "Starting engines: rollout-0: vLLM: 3.4 MiB; train-0: rank 0 loads the model's files, for "
        )
        for line in lines
    )
    assert "Starting engines: rollout, for" in lines[-1]


def test_nothing_is_said_of_a_start_that_is_over(tmp_path: Path) -> None:
    out = StringIO()
    listeners, tracker, _ = listening(tmp_path, Terminal(Console(file=out)))
    inside, over = threading.Event(), threading.Event()

    def starts() -> dict[str, str]:
        inside.set()
        over.wait(10)
        return {"train-0": "building the model"}

    listeners.tell(WorkersAsked(starts=starts))
    assert inside.wait(10)
    listeners.tell(EnginesReady(last=None, snapshot=False))
    over.set()
    listeners.tell(RunClosing())
    assert out.getvalue() == ""
    assert tracker.progress().doing is None


def test_the_store_is_told_what_the_engines_do_until_the_run_leaves(tmp_path: Path) -> None:
    listeners, _, files = listening(tmp_path, to_nobody())
    phase = "micro-batch 3 of 8"
    update = RunningCall(role="actor", method="update", token="", call="", age=1.0, phase=phase)
    listeners.tell(WorkersAsked(starts=lambda: {"train-0": "building the model"}))
    starting = seen(files, lambda one: bool(one.phases))
    assert (starting.epoch, starting.step) == (4, 0)
    assert starting.doing is not None and starting.doing.name == "Starting engines"
    assert [(one.name, one.note) for one in starting.phases] == [("train-0", "building the model")]
    listeners.tell(began(lambda: Work(calls=[update])))
    listeners.tell(EnginesReady(last=None, snapshot=False))
    listeners.tell(StepBegan(step=1, shards=2))
    attempt = Attempt(step=1, stage="update", shard=None, number=1, started=0.0)
    listeners.tell(AttemptBegan(attempt=attempt))
    told = seen(files, lambda one: any(phase.total == 8 for phase in one.phases))
    assert told.doing is None
    assert [(one.name, one.done, one.total) for one in told.phases] == [
        ("sampling", 0, 2),
        ("update", 2, 8),
    ]
    listeners.tell(RunClosing())
    assert read_progress(files) is None


def test_a_store_that_is_away_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away, real = threading.Semaphore(0), progress.write_progress

    def write(files: RunStore, progress: Progress) -> None:
        if not away.acquire(blocking=False):
            return real(files, progress)
        raise StoreUnavailable("The store does not answer.")

    monkeypatch.setattr(progress, "write_progress", write)
    listeners, _, files = listening(tmp_path, to_nobody())
    away.release()
    listeners.tell(WorkersAsked(starts=dict))
    seen(files, lambda one: True)
    listeners.tell(RunClosing())


def test_a_look_that_hangs_holds_up_no_end_and_writes_nothing_after_it(tmp_path: Path) -> None:
    listeners, _, files = listening(tmp_path, to_nobody())
    inside, over = threading.Event(), threading.Event()

    def at_work() -> Work:
        inside.set()
        over.wait(30)
        return Work()

    listeners.tell(WorkersAsked(starts=dict))
    seen(files, lambda one: True)
    listeners.tell(began(at_work))
    listeners.tell(EnginesReady(last=None, snapshot=False))
    assert inside.wait(10)
    before = time.monotonic()
    listeners.tell(RunClosing())
    assert time.monotonic() - before < 10
    assert read_progress(files) is None
    over.set()
    for thread in threading.enumerate():
        if thread.name == "progress":
            thread.join(10)
    assert read_progress(files) is None
