"""Events of a run on the Prefect server, on which infra/automations.yaml acts.

Their resource is the run, refrain.run.NAME. An event is sent in the background and never waited for.
"""

from __future__ import annotations

from prefect.events import emit_event

RUN_STARTED = "refrain.run.started"
RUN_ENDED = "refrain.run.ended"
STEP_COMMITTED = "refrain.step.committed"
ATTEMPT_FAILED = "refrain.attempt.failed"
NOT_FINITE = "refrain.guard.not-finite"  # an update was left out
SCORING_FAILED = "refrain.guard.scoring-failed"  # samples without a reward
GUARD = "refrain.guard.acted"  # a metric was beyond the bound of one of the run's guards
ROLLED_BACK = "refrain.run.rolled-back"  # the run goes on from an earlier step, as another
PROMOTED = "refrain.policy.promoted"
NOT_PROMOTED = "refrain.policy.not-promoted"


def emit(event: str, run: str, **facts: str | int | float) -> None:
    """Send an event about a run."""
    emit_event(
        event=event,
        resource={"prefect.resource.id": f"refrain.run.{run}", "prefect.resource.name": run},
        payload=dict(facts),
    )
