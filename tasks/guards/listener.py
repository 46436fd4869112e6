"""Who shows what guards tell."""

from __future__ import annotations

from tasks.guards.acting import GuardActed
from tasks.reporting.artifacts import emit
from tasks.run.events import Reports
from tasks.run.facts import RunFacts

GUARD = "refrain.guard.acted"  # on the Prefect server, where automations hear it


def listen(facts: RunFacts, reports: Reports) -> None:
    """Send an event for each to the Prefect server."""
    reports.listeners.on(GuardActed, lambda event: send(facts.name, event))


def send(run: str, event: GuardActed) -> None:
    """What a guard of a run found, and what it does."""
    record = event.record
    facts = {"guard": record.guard, "metric": record.metric, "action": str(record.action)}
    numbers = {"value": record.value, "threshold": record.threshold, "back_to": record.back_to}
    payload = {name: number for name, number in numbers.items() if number is not None}
    emit(GUARD, run, step=event.step, **facts, **payload)
