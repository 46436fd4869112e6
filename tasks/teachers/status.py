"""How a teacher's service stands: what it teaches by, and what each run has had of it."""

from __future__ import annotations

from configs.terminal_text import json_text, print_text
from engines.failures import InfrastructureError
from engines.teachers.client import Address, status_of
from engines.teachers.messages import Status
from tasks.commands.command import FOUND, GOOD, console, heading, table, text
from tasks.teachers.service import key_of_service


def show(url: str, key_variable: str, as_json: bool) -> int:
    """Print it; returns the exit code. ConfigError where no key is set, ValueError by the service."""
    address = Address(name="", url=url.rstrip("/"), key=key_of_service(key_variable))
    try:
        found = status_of(address)
    except InfrastructureError as error:
        print_text(error, error=True)
        return FOUND
    if as_json:
        print(json_text(found.model_dump(mode="json")))
        return GOOD
    _print(found)
    return GOOD


def _print(found: Status) -> None:
    out, facts = console(), found.facts
    out.print(heading(f"{facts.name}: {facts.model}, for {found.seconds:.0f} s"))
    quota = facts.tokens_per_minute
    limit = "none" if quota is None else f"{quota} tokens a minute for each run"
    out.print(text(f"{facts.taken} of {facts.places} places taken; quota: {limit}"))
    if not found.runs:
        return
    numbers = ("calls", "tokens", "in queue", "at work", "waiting", "heard")
    rows = table("run", *numbers, right=numbers)
    for run in found.runs:
        rows.add_row(
            run.run,
            str(run.calls),
            str(run.tokens),
            f"{run.queue_seconds:.1f} s",
            f"{run.seconds:.1f} s",
            f"{run.waiting} ({run.waiting_tokens} tokens)",
            f"{run.heard:.0f} s ago",
        )
    out.print(rows)
