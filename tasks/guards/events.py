"""What guards tell, and who shows it."""

from __future__ import annotations

from dataclasses import dataclass

from storage.runs.commit_log import GuardRecord
from tasks.reporting.prefect_events import emit
from tasks.run.events import Event
from tasks.run.facts import RunFacts
from tasks.run.reports import Reports

GUARD = "refrain.guard.acted"  # on the Prefect server, where automations hear it


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardActed(Event):
    """A metric of a step was beyond the bound of a guard, which does something."""

    step: int
    record: GuardRecord


def listen(facts: RunFacts, reports: Reports) -> None:
    """Send an event for each to the Prefect server."""
    reports.listeners.on(GuardActed, lambda event: send(facts.name, event))


def send(run: str, event: GuardActed) -> None:
    """What a guard of a run found, and what it does."""
    record = event.record
    facts = {"guard": record.guard, "metric": record.metric, "action": str(record.action)}
    numbers = {"value": record.value, "threshold": record.threshold, "back_to": record.back_to}
    known = {name: number for name, number in numbers.items() if number is not None}
    emit(GUARD, run, step=event.step, **facts, **known)
