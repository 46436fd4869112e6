"""Traces of a run's steps, as a collector gets them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.workers.engine import Call, TraceContext, set_trace, span_of
from tasks.reporting.traces import StepTraces
from tasks.run.attempts import Attempt
from tasks.run.events import (
    AttemptBegan,
    AttemptEnded,
    Event,
    Listeners,
    Note,
    RunEnded,
    StepBegan,
    StepCommitted,
)
from tests.collector import Collector, collector
from tests.tasks.reporting.test_listeners import facts_in

ROOT = Path(__file__).parents[3]


def listening(folder: Path, to: Collector) -> tuple[Listeners, list[Event]]:
    listeners, told = Listeners(), list[Event]()
    StepTraces(facts_in(folder), to.address, told.append).listen(listeners)
    return listeners, told


def attempt(stage: str, step: int = 1, shard: int | None = None) -> Attempt:
    return Attempt(step=step, stage=stage, shard=shard, number=1, started=time.time())


def committed(listeners: Listeners, step: int) -> None:
    record: Any = SimpleNamespace(step=step)
    event = StepCommitted(
        record=record, metrics={"reward/mean": 0.5}, scored=[], attempts=[], snapshot=False
    )
    for hear in listeners._at_once[StepCommitted]:
        hear(event)


def work() -> None:
    """What a call names."""


def current_trace() -> TraceContext | None:
    return Call.of("rollout", lambda self: work(), None).trace


def test_a_step_is_a_trace_of_stages_and_calls(tmp_path: Path) -> None:
    with collector() as got:
        listeners, told = listening(tmp_path, got)
        listeners.tell(StepBegan(step=1, shards=2))
        listeners.tell(StepBegan(step=2, shards=2))  # steps may overlap
        rollout, failed = attempt("rollout", shard=2), attempt("update", step=2)
        failed.error = "WorkerLost: gone"
        listeners.tell(AttemptBegan(attempt=rollout))
        call = Call.of("rollout", lambda self: work(), None)
        assert call.trace is not None and call.trace.endpoint == got.address
        with span_of(call.trace, "rollout.generate", {"refrain.worker": "rollout-0"}):
            pass
        listeners.tell(AttemptBegan(attempt=failed))
        listeners.tell(AttemptEnded(attempt=failed))
        assert current_trace() == call.trace, "the outer attempt goes on"
        listeners.tell(AttemptEnded(attempt=rollout))
        assert current_trace() is None
        committed(listeners, 1)
        listeners.tell(RunEnded(step=1))
        until = time.monotonic() + 20
        while not got.named("rollout.generate"):  # a worker sends every second
            assert time.monotonic() < until
            time.sleep(0.05)
    first, second = sorted(got.named("step"), key=lambda one: one.facts["refrain.step"])
    assert first.trace != second.trace and first.parent == second.parent == b""
    assert first.facts["refrain.run"] == "r" and first.facts["refrain.reward_mean"] == 0.5
    assert first.failed == "" and second.failed == "the run ended before it was committed"
    (sampled,), (updated,), (called,) = map(got.named, ("rollout", "update", "rollout.generate"))
    assert (sampled.trace, sampled.parent) == (first.trace, first.id)
    assert sampled.facts["refrain.shard"] == 2
    assert (updated.trace, updated.parent) == (second.trace, second.id)
    assert updated.failed == "WorkerLost: gone"
    assert (called.trace, called.parent) == (sampled.trace, sampled.id)
    assert told == []


def test_a_collector_that_does_not_answer_holds_no_step(tmp_path: Path) -> None:
    answers = threading.Event()
    with collector(answers=answers) as got:
        listeners, _ = listening(tmp_path, got)
        began = time.monotonic()
        for step in range(1, 200):
            listeners.tell(StepBegan(step=step, shards=1))
            one = attempt("rollout", step)
            listeners.tell(AttemptBegan(attempt=one))
            listeners.tell(AttemptEnded(attempt=one))
            committed(listeners, step)
        assert time.monotonic() - began < 2
        answers.set()
        listeners.tell(RunEnded(step=1))


@pytest.mark.slow
def test_a_run_waits_seconds_for_its_last_spans_and_no_more(tmp_path: Path) -> None:
    answers = threading.Event()
    with collector(answers=answers) as got:
        listeners, _ = listening(tmp_path, got)
        listeners.tell(StepBegan(step=1, shards=1))
        began = time.monotonic()
        listeners.tell(RunEnded(step=0))
        assert 1 < time.monotonic() - began < 15
        answers.set()


def test_what_is_not_taken_is_said_once(tmp_path: Path) -> None:
    with collector(status=400) as got:
        listeners, told = listening(tmp_path, got)
        for step in (1, 2):
            listeners.tell(StepBegan(step=step, shards=1))
            committed(listeners, step)
            until = time.monotonic() + 20
            while len(got.headers) < step:
                assert time.monotonic() < until
                time.sleep(0.05)
        listeners.tell(RunEnded(step=2))
    (note,) = told
    assert isinstance(note, Note) and note.warning
    assert note.text.startswith(f"tracking.otlp_endpoint = {got.address} does not take spans")


def test_a_call_goes_on_where_opentelemetry_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engines.workers.spans", None)
    trace = TraceContext(
        endpoint="http://127.0.0.1:1", parent="00-" + 32 * "1" + "-0000000000000001-01"
    )
    with span_of(trace, "rollout.generate", {}):
        done = True
    assert done


def test_calls_have_no_trace_without_one() -> None:
    assert Call.of("rollout", lambda self: work(), None).trace is None
    trace = TraceContext(endpoint="http://a", parent="p")
    assert set_trace(trace) is None
    assert set_trace(None) == trace


def test_none_of_it_is_imported_without_the_setting() -> None:
    code = (
        "import sys, tasks.reporting.listeners, flows.grpo, engines.workers.host\n"
        "print([one for one in sys.modules if one.startswith('opentelemetry.sdk.trace')"
        " or one.startswith('opentelemetry.exporter') or one in ('engines.workers.spans', 'tasks.reporting.traces')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"
