"""What stands around every algorithm: a run is opened or resumed, makes its steps, ends in order.

The algorithm is the flow of one step; see flows/grpo.py for a whole flow.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from prefect import tags
from prefect.context import FlowRunContext
from prefect.states import Completed, State

from configs.grpo import GRPOConfig
from configs.process import begin_process, close_to_others
from configs.resolving import resolve, this_machine
from storage.objects.store import Store
from storage.prompts.cursor import Exhausted
from storage.runs.commit_log import Commit, head
from storage.runs.live import goes_on_as, is_done
from storage.runs.run_store import RunStore
from tasks.commit import snapshot
from tasks.evaluation.evaluate import Evaluations, evaluation
from tasks.reporting.artifacts import skipped
from tasks.reporting.listeners import reporting_on
from tasks.reporting.terminal import Terminal
from tasks.results import RunSummary, Updated
from tasks.run.beginning import NothingNew
from tasks.run.clock import StepGivenUp
from tasks.run.events import Note, SnapshotStored, StepBegan
from tasks.run.flow_options import forget_results, result_of
from tasks.run.flow_run import (
    attempt,
    begun_before,
    deployment_name,
    filled_in,
    name_before,
    part_from_earlier_attempts,
)
from tasks.run.life_cycle import BranchEnded, begun_anew, finish, or_cancelled, shown, started
from tasks.run.opening import open_run, told_kept
from tasks.run.preflight import check, curves_of_one_machine, slow_here
from tasks.run.run import Run
from tasks.run.run_record import path_of
from tasks.start import start_engines


def train(
    step_flow: Callable[[Run, int], Any],
    config: GRPOConfig,
    resume: str | None,
    fork: str | None,
    run: Run | None,
) -> RunSummary | State[None]:
    """Make the steps of a run, judge its policy, and say where everything is.

    The body of a run's flow, whose parameters these are. `run`: what the command line has started
    by them; None where a worker called the flow. With nothing new to train on, the flow run ends as
    Skipped; cancelled on the dashboard, as Cancelled. A later attempt of the flow run goes on with
    what an earlier one began.
    """
    return or_cancelled(partial(_train, step_flow, config, resume, fork, run))


def _train(
    step_flow: Callable[[Run, int], Any],
    config: GRPOConfig,
    resume: str | None,
    fork: str | None,
    run: Run | None,
) -> RunSummary | State[None]:
    tried = attempt()
    with contextlib.ExitStack() as stack:
        if run is not None and tried > 1:
            run = stack.enter_context(begun_anew(run))
        elif run is None:
            begin_process()  # a server's worker has not
            close_to_others()
            name_before(config.name)
            config = resolve(config, this_machine()).settings  # a command has resolved its own
            if tried > 1 and resume is None and (begun := _begun_before(config)) is not None:
                resume, fork = begun.run, None  # it has been made
                last = goes_on_as(begun)
                if is_done(last, head(last) or 0):
                    part_from_earlier_attempts(tried)
                    return Completed(message=f"Run {last.run} was finished by an earlier attempt.")
            findings = check(config, resumed=resume is not None)
            findings += slow_here(config)  # a deployment was made on another machine
            findings += curves_of_one_machine(config, deployment_name())
            try:
                form = filled_in(GRPOConfig)
                opened = open_run(_this_flow(), config, resume, fork, filled_in=form)
            except NothingNew as nothing:
                return skipped(nothing)
            if resume is not None:
                findings += told_kept(config, opened.config)
            reporting = reporting_on(Terminal())
            run = stack.enter_context(started(opened, reporting, waits=tried > 1))
            if resume is not None:
                run.tell(Note(text=f"Going on with {run.name} after step {run.head}"))
            for finding in findings:
                if finding.warning:
                    run.tell(Note(text=finding.found, warning=True))
        if tried > 1:  # only now: until the run was held, another attempt may have been alive
            part_from_earlier_attempts(tried, (step_flow, evaluation))
        pages = stack.enter_context(contextlib.ExitStack())
        while True:
            pages.enter_context(shown(run))
            start_engines(run)
            tests = None
            if run.config.evaluation is not None:
                tests = Evaluations(run, run.config.evaluation)
                stack.callback(tests.close)
            end = make_steps(step_flow, run, tests)
            if not isinstance(end, BranchEnded):
                break
            pages.close()
            run = stack.enter_context(end.successor(run))
        results = None if tests is None else tests.end()
        for feature in run.features:
            feature.after_steps(run, results)
        return finish(run, data_over=end)


def _begun_before(config: GRPOConfig) -> RunStore | None:
    """The run of an earlier attempt of this flow run."""
    return begun_before(Store(config.store.uri, config.store.options), config.name)


def make_steps(
    step_flow: Callable[[Run, int], Any], run: Run, tests: Evaluations | None
) -> bool | BranchEnded:
    """Make the steps that are left; whether the data's epochs were over before the last of them.

    BranchEnded where another run goes on. That may have been decided in its last commit, by a flow
    that died.
    """
    if run.head > run.start:
        for feature in run.features:
            feature.take_up(run)

    def make(step: int) -> None:
        _make(step_flow, run, step)
        if tests is not None:
            tests.after(step)

    try:
        run.gate.check_end(run.head)
        if tests is not None:
            tests.begin()
        if run.config.max_staleness:
            _overlapping(make, run)
        else:
            for step in run.clock.steps_left():
                make(step)
    except BranchEnded as ended:
        return ended
    except Exhausted:  # found while drawing: some of the last prompts are too long
        if run.last is None:
            raise
        clock, carried = run.clock, len(run.clock.position.carried)
        if not clock.snapshot_due(run.head, run.cursor, carried):  # nobody knew that it is the last
            keep_last(run, run.last)
        return True
    return run.head < run.config.steps


def _make(step_flow: Callable[[Run, int], Any], run: Run, step: int) -> None:
    run.clock.begin(step)
    run.tell(StepBegan(step=step, shards=run.config.shards_at_once))
    with tags(f"step {step}"):
        step_flow(run, step)
    forget_results()
    run.gate.check_end(step)


def _overlapping(make: Callable[[int], None], run: Run) -> None:
    """Up to max_staleness + 1 steps at once, each flow in a thread of its own.

    When a step fails, those before it are finished, those after it given up, and its failure raised.
    """
    under_way: list[Future[None]] = []
    # One more, since the flow of a step that is committed still ends when the next may begin.
    at_once = run.config.max_staleness + 2
    with ThreadPoolExecutor(at_once, thread_name_prefix="step") as threads:

        def made(step: int) -> None:
            try:
                make(step)
            except BaseException:
                run.gate.fail(step)
                raise

        try:
            with contextlib.suppress(StepGivenUp):  # what failed is raised below
                for step in run.clock.steps_left():
                    # A failure stays, to be raised below; what went well is not kept for every step.
                    under_way = [future for future in under_way if not _went_well(future)]
                    here = contextvars.copy_context()  # the flow run that a step's is a part of
                    under_way.append(threads.submit(here.run, made, step))
            for step_future in under_way:
                step_future.result()
        except Exhausted:
            raise
        except BaseException:
            run.gate.give_up()
            raise


def _went_well(step: Future[None]) -> bool:
    return step.done() and not step.cancelled() and step.exception() is None


def keep_last(run: Run, commit: Commit) -> None:
    """Store the trainers' state after a step, and register its policy version."""
    last = Updated(version=run.head, metrics={})
    result_of(snapshot.submit(run, run.head, last))
    run.tell(SnapshotStored(record=commit))


def _this_flow() -> str:
    context = FlowRunContext.get()
    assert context is not None and context.flow is not None, "train() is the body of a flow"
    return path_of(context.flow)
