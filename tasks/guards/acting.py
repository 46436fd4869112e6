"""What follows from the guards' verdicts on a step, once that is committed: words, events, an end.

Going back: the branch of a run that a guard ended goes on from an earlier step, as a fork of it. The
commit that holds the verdict decides. From it follow the step, the changed settings and the name of
the child, so a flow that is killed anywhere in between and resumed does the same:

1. the step with the verdict is committed; steps under way beyond it are given up;
2. the child is put on record (run.json) and pinned at its parent, unless that was done before;
3. the parent's end says where it went on: from now on `--resume PARENT` goes on with the child;
4. the child makes its steps, by the workers of its parent where nothing else runs on them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from prefect.logging import get_run_logger

from configs.flows import fork_command, resume_command
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, change
from configs.resolving import resolve, this_machine
from engines.workers.cluster import Cluster
from storage.runs.commit_log import GuardRecord, Outline
from storage.runs.forks import NoSuchOrigin, begin_at
from storage.runs.live import End, RolledBack, workers_ended, write_end
from storage.runs.run_store import RollbackCause, RunStore, origin_of
from tasks.guards.judging import (
    bound_in_force,
    guard_sentence,
    pending_rollback,
    rollbacks,
    verdicts,
)
from tasks.results import Metrics
from tasks.run.clock import BOUND
from tasks.run.contract import FeatureView
from tasks.run.events import Event, Note, RunRolledBack
from tasks.run.facts import OpenedRun
from tasks.run.features import Verdicts
from tasks.run.life_cycle import BranchEnded, last_pages, started
from tasks.run.opening import open_run
from tasks.run.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardActed(Event):
    """A metric of a step was beyond the bound of a guard, which does something."""

    step: int
    record: GuardRecord


def judge_step(run: FeatureView, step: int, metrics: Metrics) -> Verdicts:
    """The guards' verdicts, and max_staleness for the steps after it where one ends their overlap."""
    records = guards_on(run, step, metrics)
    lowered = any(record.action == "synchronous" for record in records)
    return Verdicts(records=records, metrics={BOUND: 0.0} if lowered else {})


def guards_on(run: FeatureView, step: int, metrics: Metrics) -> list[GuardRecord]:
    """The guards' verdicts on a step that is about to be committed.

    Before the step at which this branch began what a rollback needs may be gone: then it ends there.
    """
    records = verdicts(
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
        for record in records
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
    sentence = guard_sentence(record, step)
    if record.action == "synchronous":
        run.gate.lower(0)
        sentence += (
            " The steps under way are finished; from now on max_staleness is 0. To overlap again, "
            "resume with guards=[]."
        )
    elif record.action == "stop":
        sentence += _remedy(run, step, record)
        run.gate.end_after(step, GuardStopped(sentence))
    elif record.action == "rollback":
        sentence += f" The run goes back to step {record.back_to}" + (
            f", with {', '.join(record.change)}." if record.change else "."
        )
        run.gate.end_after(step, WentBack(record, step))
    get_run_logger().warning(sentence)
    if record.action != "stop":  # that is the run's last word, said as its error
        run.tell(Note(text=sentence, warning=True))
    run.tell(GuardActed(step=step, record=record))


def _remedy(run: FeatureView, step: int, record: GuardRecord) -> str:
    """What a person can do who is told that the run was stopped."""
    guard = next(candidate for candidate in run.config.guards if candidate.label == record.guard)
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


CHILD = "-rollback-"  # between the family's first name and the rollback's number


class GuardStopped(RuntimeError):
    """A guard has ended the run, which can be resumed."""


class WentBack(BranchEnded):
    """A guard has ended this branch of the run: it goes on from an earlier step."""

    def __init__(self, record: GuardRecord, step: int) -> None:
        super().__init__(guard_sentence(record, step))
        self.record = record
        self.step = step  # after which it was decided

    def successor(self, run: Run) -> contextlib.AbstractContextManager[Run]:
        """The fork at the earlier step."""
        return went_back(run, self)


def child_name(parent: str, number: int) -> str:
    """The name of the run that goes on after a rollback; no other run has it."""
    return f"{re.sub(rf'{CHILD}[0-9]+$', '', parent)}{CHILD}{number}"


@contextlib.contextmanager
def went_back(run: Run, back: WentBack) -> Iterator[Run]:
    """The run that goes on from the earlier step, which ends with the body; `run` has ended before.

    Raises GuardStopped where the step is no longer there to go on from.
    """
    cause = RollbackCause(
        run=run.name,
        after=back.step,
        guard=back.record.guard,
        why=guard_sentence(back.record, back.step),
        number=rollbacks(run.origin) + 1,
        change=back.record.change,
    )
    opened = _opened(run, back.record, cause)
    cluster = _left(run, opened.config)
    with started(opened, run.reporting, cluster=cluster) as child:
        _on_record(run, child, back.record, cause)
        try:
            yield child
        finally:
            if child.cancelled.is_set() and not child.gate.given_up:  # by a person
                run.gate.given_up = False
                run.cancelled.set()


def _opened(run: Run, record: GuardRecord, cause: RollbackCause) -> OpenedRun:
    """The child as it is in the store, or as it is to be."""
    assert record.back_to is not None, "the record is of a rollback"
    name = child_name(run.name, cause.number)
    try:
        config = change(type(run.config), run.config.model_dump(mode="json"), record.change)
        config = resolve(config, this_machine()).settings  # what the change has left open
        there = RunStore(run.store, name)
        if there.read_run() is None:
            fork = f"{run.name}@{record.back_to}"
            return open_run(run.flow, config, fork=fork, name=name, cause=cause)
        begun = origin_of(there)
        if begun is None or begun.rollback != cause:
            raise ConfigError(f"There is another run of the name {name}. Remove it.")
        return open_run(run.flow, config, resume=name)
    except ConfigError as error:
        on = fork_command(run.flow, run.config.store, f"{run.name}@{run.head}")
        sentence = (
            f"{cause.why} The run cannot go back: {error} Or go on without by {on} guards=[]."
        )
        raise GuardStopped(sentence) from error


def _left(run: Run, config: GRPOConfig) -> Cluster | None:
    """End the run, whose workers go on where they can; None: they were ended too.

    They can where no step is under way, whose calls would still be at work on them, and where the
    child (`config`) asks for the same ones.
    """
    same = (run.config.cluster, run.config.rollout) == (config.cluster, config.rollout)
    alone = run.config.max_staleness == 0 and not run.config.cluster.share_devices
    alone = alone and run.config.train.engine != "elastic" and not run.config.evaluates_aside
    if not (same and alone):
        run.engines.close()
    last_pages(run)
    return run.engines.hand_over() if same and alone else None


def _on_record(run: Run, child: Run, record: GuardRecord, cause: RollbackCause) -> None:
    """The parent's last words: its end in the store, in MLflow and on the dashboard."""
    assert record.back_to is not None, "the record is of a rollback"
    end = RolledBack(to=record.back_to, child=child.name, guard=cause.guard, why=cause.why)
    write_end(run.files, End(step=run.head, rolled_back=end))
    workers_ended(run.files)
    run.tell(
        RunRolledBack(
            step=run.head,
            back_to=record.back_to,
            guard=cause.guard,
            child=child.name,
            number=cause.number,
            fresh=run.cursor.fresh,
        )
    )
    child.tell(Note(text=f"Run {child.name} goes on after {child.origin}."))
