"""Events of a run on the Prefect server, on which infra/automations.yaml acts.

Their resource is the run, refrain.run.NAME. An event is sent in the background and never waited for.
"""

from __future__ import annotations

from prefect.events import emit_event

from tasks.run.events import (
    AttemptFailed,
    Listeners,
    RunBegan,
    RunEnded,
    RunRolledBack,
    StepCommitted,
)

RUN_STARTED = "refrain.run.started"
RUN_ENDED = "refrain.run.ended"
STEP_COMMITTED = "refrain.step.committed"
ATTEMPT_FAILED = "refrain.attempt.failed"
NOT_FINITE = "refrain.guard.not-finite"  # an update was left out
SCORING_FAILED = "refrain.guard.scoring-failed"  # samples without a reward
ROLLED_BACK = "refrain.run.rolled-back"  # the run goes on from an earlier step, as another


def emit(event: str, run: str, **facts: str | int | float) -> None:
    """Send an event about a run."""
    emit_event(
        event=event,
        resource={"prefect.resource.id": f"refrain.run.{run}", "prefect.resource.name": run},
        payload=dict(facts),
    )


class PrefectEvents:
    """Sends what automations act on."""

    def __init__(self, run: str) -> None:
        self._run = run

    def listen(self, listeners: Listeners) -> None:
        """Hear what the run says."""
        listeners.on(RunBegan, lambda event: self._emit(RUN_STARTED, steps=event.steps))
        listeners.on(AttemptFailed, self.attempt_failed)
        listeners.later(StepCommitted, self.step_committed)
        listeners.on(RunRolledBack, self.rolled_back)
        listeners.on(RunEnded, lambda event: self._emit(RUN_ENDED, step=event.step))

    def _emit(self, event: str, **facts: str | int | float) -> None:
        emit(event, self._run, **facts)

    def attempt_failed(self, event: AttemptFailed) -> None:
        """A call that may be tried again."""
        tried = event.attempt
        self._emit(ATTEMPT_FAILED, step=tried.step, stage=tried.stage, cause=tried.error[:500])

    def step_committed(self, event: StepCommitted) -> None:
        """A step, and what of it went wrong."""
        step, metrics = event.record.step, event.record.metrics
        self._emit(
            STEP_COMMITTED,
            step=step,
            seconds=round(event.metrics["time/step"], 2),
            retries=int(event.metrics["retries"]),
        )
        if left_out := int(metrics.get("train/skipped_steps") or 0):
            self._emit(NOT_FINITE, step=step, optimizer_steps=left_out)
        if failed := sum(shard.failures for shard in event.scored):
            self._emit(SCORING_FAILED, step=step, samples=failed)

    def rolled_back(self, event: RunRolledBack) -> None:
        """Where the run goes on."""
        self._emit(
            ROLLED_BACK,
            step=event.step,
            back_to=event.back_to,
            guard=event.guard,
            child=event.child,
            number=event.number,
        )
