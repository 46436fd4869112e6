"""Who shows that a policy version was judged."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from storage.tracking.registry import PROMOTION_TAG
from tasks.markdown import escaped
from tasks.promotion.judging import PolicyJudged
from tasks.reporting.artifacts import emit, key
from tasks.run.events import Reports
from tasks.run.facts import RunFacts

PROMOTED = "refrain.policy.promoted"  # on the Prefect server, where automations hear it
NOT_PROMOTED = "refrain.policy.not-promoted"


def listen(facts: RunFacts, reports: Reports) -> None:
    """Show it: a tag on MLflow's page of the run, a note on the dashboard, an event."""
    listeners, tracking = reports.listeners, reports.tracking
    listeners.on(PolicyJudged, lambda event: tracking.tag(PROMOTION_TAG, event.reason))
    listeners.on(PolicyJudged, lambda event: show_judgement(facts, event))
    listeners.on(PolicyJudged, lambda event: send(facts.name, event))


def send(run: str, event: PolicyJudged) -> None:
    """Whether a version of a run was promoted."""
    what = PROMOTED if event.promoted else NOT_PROMOTED
    emit(what, run, version=event.version, reason=event.reason)


def show_judgement(run: RunFacts, event: PolicyJudged) -> None:
    """The note of a promotion, or of why there was none."""
    verdict = f"is now the {event.alias}" if event.promoted else f"did not become the {event.alias}"
    create_markdown_artifact(
        key=key(run.name, "promotion"),
        markdown="\n".join(
            [
                f"### Version {event.version} of {escaped(run.name)} {verdict}",
                "",
                escaped(event.reason),
                "",
                "| held-out reward | standard error | samples | failed | truncated | registry |",
                "|---|---|---|---|---|---|",
                f"| {event.reward:.4f} | {event.error:.4f} | {event.samples} "
                f"| {event.failed} | {event.truncated} | {escaped(event.model)} {event.number} |",
            ]
        ),
        description=f"Promotion of {run.name}: {verdict}.",
    )
