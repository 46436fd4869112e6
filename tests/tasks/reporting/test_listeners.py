"""Who listens to a run when all are put together."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.reporting.listeners import evaluation_listeners, reporting_on
from tasks.reporting.terminal import Terminal
from tasks.run import events
from tasks.run.events import (
    AttemptFailed,
    BackFillBegan,
    BackFillEnded,
    CommitEvent,
    Event,
    Listeners,
    Note,
    RunClosed,
    RunClosing,
    RunEnded,
    VersionEvaluated,
)
from tasks.run.facts import RunFacts


def facts_in(folder: Path) -> RunFacts:
    source: Any = None  # it is read once the engines are ready
    return RunFacts(
        name="r",
        flow="flows.grpo:grpo",
        config=load_recipe(GRPOConfig, "tiny"),
        files=RunStore(Store(str(folder)), "r"),
        source=source,
        origin=None,
        start=0,
        epoch=1,
    )


def heard(*all_of_them: Listeners) -> set[type[Event]]:
    return {event for one in all_of_them for event in {*one._at_once, *one._later}}


def test_somebody_hears_every_fact(tmp_path: Path) -> None:
    terminal, facts = Terminal(Console(file=StringIO())), facts_in(tmp_path)
    reports = reporting_on(terminal)(facts)
    evaluation = evaluation_listeners(terminal, "r-evaluation", facts.files, facts.config)
    facts_told = {
        one
        for one in vars(events).values()
        if isinstance(one, type) and issubclass(one, Event) and one not in (Event, CommitEvent)
    }
    assert len(facts_told) > 20
    assert heard(reports.listeners) == facts_told - {BackFillBegan, BackFillEnded}
    assert {Note, AttemptFailed, BackFillBegan, VersionEvaluated} <= heard(evaluation)


def test_automations_hear_of_a_back_fill_whose_calls_fail(tmp_path: Path, monkeypatch: Any) -> None:
    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "tasks.reporting.artifacts.emit", lambda event, run, **facts: sent.append((event, run))
    )
    terminal, facts = Terminal(Console(file=StringIO())), facts_in(tmp_path)
    listeners = evaluation_listeners(terminal, "r-evaluation-1", facts.files, facts.config)
    attempt: Any = SimpleNamespace(step=0, stage="evaluate", shard=1, number=1, error="no worker")
    listeners.tell(AttemptFailed(attempt=attempt))
    assert sent == [("refrain.attempt.failed", "r-evaluation-1")]


def test_a_run_that_ends_before_it_began_is_told_too(tmp_path: Path, monkeypatch: Any) -> None:
    sent: list[str] = []
    monkeypatch.setattr(
        "tasks.reporting.artifacts.emit", lambda event, run, **facts: sent.append(event)
    )
    listeners = reporting_on(Terminal(Console(file=StringIO())))(facts_in(tmp_path)).listeners
    for event in (RunEnded(step=0), RunClosing(), RunClosed(error=RuntimeError("no worker"))):
        listeners.tell(event)
    assert sent == ["refrain.run.ended"]
