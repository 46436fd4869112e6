"""The guard of a run whose steps overlap: whether samples are too far off the policy that trains.

What it decides stands in the metrics of the commit, so that a resumed run goes on with it from its
last commit alone: staleness/bound, max_staleness in force for steps that begin from then on, and
staleness/steps_beyond, the steps in a row whose metric was beyond the guard's bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect.logging import get_run_logger

from configs.grpo import GRPOConfig
from configs.staleness_guard import StalenessGuardConfig
from storage.runs.commit_log import Commit
from tasks.reporting import events
from tasks.reporting.run_view import RunView
from tasks.results import Metrics
from tasks.run.staleness_gate import Gate

BOUND = "staleness/bound"
BEYOND = "staleness/steps_beyond"


class StalenessGuardStopped(RuntimeError):
    """The guard has ended the run, which can be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the guard says after a step."""

    max_staleness: int  # in force for steps that begin from now on
    beyond: int = 0  # steps in a row beyond the bound, this one included
    due: bool = False  # whether that is as many as the guard's patience: its action follows


def judge(
    guard: StalenessGuardConfig, max_staleness: int, before: int, value: float | None
) -> Verdict:
    """The guard's verdict on a step.

    Args:
        guard: its settings.
        max_staleness: in force until now; at 0 there is nothing left to guard.
        before: steps in a row before this one that were beyond the bound.
        value: of the metric; None where the step has none, which leaves the count as it is.
    """
    if max_staleness == 0:
        return Verdict(max_staleness=0)
    beyond = before
    if value is not None:
        beyond = before + 1 if guard.crossed_by(value) else 0
    due = value is not None and beyond >= guard.patience
    synchronous = due and guard.action == "synchronous"
    return Verdict(max_staleness=0 if synchronous else max_staleness, beyond=beyond, due=due)


def bound_in_force(config: GRPOConfig, last: Commit | None) -> int:
    """max_staleness for the steps after a commit of this run; None: before its first.

    What a guard has lowered stays so for as long as there is a guard.
    """
    if config.staleness_guard is None or last is None:
        return config.max_staleness
    bound = last.metrics.get(BOUND)
    return config.max_staleness if bound is None else min(int(bound), config.max_staleness)


def steps_beyond(guard: StalenessGuardConfig, last: Commit | None) -> int:
    """Steps in a row beyond the bound up to a commit of this run; None: before its first.

    A run that the guard has stopped begins to count anew when a person resumes it.
    """
    found = None if last is None else last.metrics.get(BEYOND)
    return int(found) if found is not None and found < guard.patience else 0


def verdict_on(
    config: GRPOConfig, in_force: int, last: Commit | None, metrics: Metrics
) -> Verdict | None:
    """The verdict on a step that is about to be committed; None where steps never overlap.

    Args:
        config: of the run.
        in_force: max_staleness until now.
        last: the commit before; None where that is no step of this run.
        metrics: of the step.
    """
    if config.max_staleness == 0:
        return None
    guard = config.staleness_guard
    if guard is None:
        return Verdict(max_staleness=in_force)
    return judge(guard, in_force, steps_beyond(guard, last), metrics.get(guard.metric))


def recorded(config: GRPOConfig, verdict: Verdict | None) -> Metrics:
    """What the commit says of a verdict."""
    if verdict is None:
        return {}
    found = {BOUND: float(verdict.max_staleness)}
    return found if config.staleness_guard is None else {**found, BEYOND: float(verdict.beyond)}


def carry_out(
    run: RunView, gate: Gate, step: int, verdict: Verdict | None, metrics: Metrics
) -> None:
    """Do what a verdict asks for, before the gate knows of the commit, and tell people."""
    guard = run.config.staleness_guard
    if guard is None or verdict is None or not verdict.due:
        return
    if step == run.config.steps:  # no step is left that could overlap, or not be made
        return
    why = reason(guard, step, metrics[guard.metric], verdict.beyond)
    if guard.action == "synchronous":
        gate.lower(verdict.max_staleness)
        said = (
            f"{why} The steps under way are finished; from now on max_staleness is 0. To overlap "
            "again, resume with staleness_guard=null."
        )
        run.terminal.say(said, style="yellow")
    else:
        other = "lower" if guard.is_least else "higher"
        said = (
            f"{why} Resume with staleness_guard.action=synchronous, a {other} "
            "staleness_guard.bound, or staleness_guard=null."
        )
        gate.end_after(step, StalenessGuardStopped(said))
    get_run_logger().warning(said)
    events.emit(
        events.STALENESS_GUARD,
        run.name,
        step=step,
        metric=guard.metric,
        value=metrics[guard.metric],
        bound=guard.bound,
        action=guard.action,
    )


def reason(guard: StalenessGuardConfig, step: int, value: float, beyond: int) -> str:
    """Why the guard acts, as a sentence."""
    where = "below" if guard.is_least else "above"
    often = "" if beyond == 1 else f" for {beyond} steps in a row by now"
    return (
        f"{guard.metric} of step {step} was {value:.4g}, {where} staleness_guard.bound = "
        f"{guard.bound:g}{often}."
    )
