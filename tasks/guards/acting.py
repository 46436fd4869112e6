"""What follows from the guards' verdicts on a step, once that is committed: words, events, an end."""

from __future__ import annotations

from prefect.logging import get_run_logger

from configs.flows import fork_command, resume_command
from storage.runs.commit_log import GuardRecord, Outline
from storage.runs.forks import NoSuchOrigin, begin_at
from tasks.guards.events import GuardActed
from tasks.guards.judging import (
    bound_in_force,
    guard_sentence,
    pending_rollback,
    rollbacks,
    verdicts,
)
from tasks.guards.rollback import GuardStopped, WentBack
from tasks.results import Metrics
from tasks.run.clock import BOUND
from tasks.run.contract import FeatureView
from tasks.run.events import Note
from tasks.run.features import Verdicts


def judge_step(run: FeatureView, step: int, metrics: Metrics) -> Verdicts:
    """The guards' verdicts, and max_staleness for the steps after it where one ends their overlap."""
    records = guards_on(run, step, metrics)
    lowered = any(record.action == "synchronous" for record in records)
    return Verdicts(records=records, metrics={BOUND: 0.0} if lowered else {})


def guards_on(run: FeatureView, step: int, metrics: Metrics) -> list[GuardRecord]:
    """The guards' verdicts on a step that is about to be committed.

    Before the step at which this branch began what a rollback needs may be gone: then it ends there.
    """
    found = verdicts(
        run.config,
        step,
        run.last,
        run.start,
        run.gate.max_staleness,
        rollbacks(run.origin),
        {**run.measured, **metrics},
    )
    return [
        record.model_copy(update={"back_to": run.start})
        if record.back_to is not None and record.back_to < run.start and not _there(run, record)
        else record
        for record in found
    ]


def _there(run: FeatureView, record: GuardRecord) -> bool:
    """Whether the store still has what a run needs that goes back to the record's step."""
    try:
        begin_at(run.files, record.back_to, fork=True)
    except NoSuchOrigin:
        return False
    return True


def take_up(run: FeatureView) -> None:
    """Have the gate know what the last commit says; what a flow died after is carried out yet."""
    run.gate.lower(bound_in_force(run.config, run.last))
    decided = pending_rollback(run.last)
    if decided is not None:
        run.gate.end_after(run.head, WentBack(decided, run.head))


def carry_out(run: FeatureView, commit: Outline) -> None:
    """Do what the verdicts in a commit ask for, before the gate knows of it, and tell people."""
    for record in commit.guards:
        if record.value is not None and run.measured.get(record.metric) == record.value:
            del run.measured[record.metric]  # it is judged once
        if record.action is not None:
            _act(run, commit.step, record)


def _act(run: FeatureView, step: int, record: GuardRecord) -> None:
    said = guard_sentence(record, step)
    if record.action == "synchronous":
        run.gate.lower(0)
        said += (
            " The steps under way are finished; from now on max_staleness is 0. To overlap again, "
            "resume with guards=[]."
        )
    elif record.action == "stop":
        said += _remedy(run, step, record)
        run.gate.end_after(step, GuardStopped(said))
    elif record.action == "rollback":
        said += f" The run goes back to step {record.back_to}" + (
            f", with {', '.join(record.change)}." if record.change else "."
        )
        run.gate.end_after(step, WentBack(record, step))
    get_run_logger().warning(said)
    if record.action != "stop":  # that is the run's last word, said as its error
        run.tell(Note(text=said, warning=True))
    run.tell(GuardActed(step=step, record=record))


def _remedy(run: FeatureView, step: int, record: GuardRecord) -> str:
    """What a person can do who is told that the run was stopped."""
    guard = next(one for one in run.config.guards if one.label == record.guard)
    why = ""
    if guard.action == "rollback":
        spent = rollbacks(run.origin) >= run.config.max_rollbacks
        why = (
            f" It would go back, and max_rollbacks = {run.config.max_rollbacks} are spent."
            if spent
            else f" It would go back {guard.rollback.steps} steps, and there are none before."
        )
    earlier = max(1, step - guard.rollback.steps)
    again = resume_command(run.flow, run.config.store, run.name)
    fork = fork_command(run.flow, run.config.store, f"{run.name}@{earlier}")
    return (
        f"{why} Look at the run, then go on by {again}, with another bound of the guard or "
        f"guards=[], or from an earlier step by {fork}."
    )
