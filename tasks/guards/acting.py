"""What follows from the guards' verdicts on a step, once that is committed: words, events, an end."""

from __future__ import annotations

from prefect.logging import get_run_logger

from configs.flows import fork_command, resume_command
from storage.runs.commit_log import GuardRecord, Outline
from storage.runs.forks import NoSuchOrigin, begin_at
from tasks.guards.judging import guard_sentence, verdicts
from tasks.results import Metrics
from tasks.run.events import GuardActed
from tasks.run.run import Run
from tasks.run.staleness_gate import BOUND


class GuardStopped(RuntimeError):
    """A guard has ended the run, which can be resumed."""


class WentBack(Exception):
    """A guard has ended this branch of the run: it goes on from an earlier step."""

    def __init__(self, record: GuardRecord, step: int) -> None:
        super().__init__(guard_sentence(record, step))
        self.record = record
        self.step = step  # after which it was decided


def guards_on(run: Run, step: int, metrics: Metrics) -> list[GuardRecord]:
    """The guards' verdicts on a step that is about to be committed.

    Before the step at which this branch began what a rollback needs may be gone: then it ends there.
    """
    found = verdicts(
        run.config,
        step,
        run.last,
        run.start,
        run.gate.max_staleness,
        run.rollbacks,
        {**run.measured, **metrics},
    )
    return [
        record.model_copy(update={"back_to": run.start})
        if record.back_to is not None and record.back_to < run.start and not _there(run, record)
        else record
        for record in found
    ]


def _there(run: Run, record: GuardRecord) -> bool:
    """Whether the store still has what a run needs that goes back to the record's step."""
    try:
        begin_at(run.files, record.back_to, fork=True)
    except NoSuchOrigin:
        return False
    return True


def bound_after(run: Run, records: list[GuardRecord]) -> Metrics:
    """max_staleness for steps that begin after a commit with these verdicts, as its metric."""
    if run.config.max_staleness == 0:
        return {}
    lowered = any(record.action == "synchronous" for record in records)
    return {BOUND: 0.0 if lowered else float(run.gate.max_staleness)}


def carry_out(run: Run, commit: Outline) -> None:
    """Do what the verdicts in a commit ask for, before the gate knows of it, and tell people."""
    for record in commit.guards:
        if record.value is not None and run.measured.get(record.metric) == record.value:
            del run.measured[record.metric]  # it is judged once
        if record.action is not None:
            _act(run, commit.step, record)


def _act(run: Run, step: int, record: GuardRecord) -> None:
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
    run.tell(GuardActed(step=step, record=record, sentence=said))


def _remedy(run: Run, step: int, record: GuardRecord) -> str:
    """What a person can do who is told that the run was stopped."""
    guard = next(one for one in run.config.guards if one.label == record.guard)
    why = ""
    if guard.action == "rollback":
        spent = run.rollbacks >= run.config.max_rollbacks
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
