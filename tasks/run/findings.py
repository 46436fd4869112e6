"""What a check before the start says: that something is good, or one sentence why no run begins."""

from __future__ import annotations

from dataclasses import dataclass

from configs.overrides import ConfigError
from configs.resolving import slow_formats, this_machine
from configs.run import RunConfig
from tasks.memory.places import Place


class PreflightError(ConfigError):
    """The run cannot start; the message says what, which value, and what to set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check looked at and found good."""

    check: str  # one word
    found: str  # for people
    place: Place | None = None  # of a memory plan, which `found` sums up
    warning: bool = False  # nothing that stops the run, and still to be read before it


def slow_here(config: RunConfig) -> list[Finding]:
    """Of settings that were stored or deployed: what was decided elsewhere and is slow here."""
    said = slow_formats(config, this_machine())
    return [Finding(check="warning", found=sentence, warning=True) for sentence in said]


def curves_of_one_machine(config: RunConfig, deployment: str | None) -> list[Finding]:
    """That nobody else sees the curves of a deployment's run, which MLflow keeps in a local file."""
    if deployment is None or not config.tracking.uri.startswith("sqlite:"):
        return []
    said = (
        f"The curves of this run go to {config.tracking.uri}, a file on the machine that runs it. "
        f"For others to see them: refrain deploy {deployment} tracking.uri=http://…"
    )
    return [Finding(check="warning", found=said, warning=True)]
