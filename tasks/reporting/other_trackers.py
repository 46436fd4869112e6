"""A run's curves in trackers besides MLflow (tracking.also), fed from the flow: a write per step.

Each has a queue that no step waits for (mlflow_page.PageQueue), and a process (tracker_process.py).
What is written is read from the run's commits, from the step on that the tracker has last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from configs.grpo import GRPOConfig
from storage.runs.commit_log import head, read_commit
from storage.runs.live import is_done
from storage.runs.run_store import RunStore, origin_of, start_of
from storage.tracking.curve_trackers import CurvesOf, stored_run
from storage.tracking.tracker import tags_of
from tasks.reporting.mlflow_page import (
    PageQueue,
    Write,
    cost_of_run,
    tracked_evaluation,
    tracked_run,
)
from tasks.reporting.tracker_process import TrackerProcess
from tasks.run.events import (
    BackFillBegan,
    BackFillEnded,
    EnginesReady,
    Listeners,
    RunClosed,
    RunFinished,
    RunRolledBack,
    StepCommitted,
    VersionEvaluated,
)
from tasks.run.facts import RunFacts
from tasks.run.metrics import numbers_of
from tasks.run.run_record import stored_settings

# Seconds for which a run that has ended waits for a tracker that is away, and for one that is slow.
PATIENCE, SLOW = 10.0, 120.0


class OtherTracker:
    """One tracker of a run, or of a run of the past whose versions are evaluated."""

    def __init__(
        self, kind: str, config: GRPOConfig, files: RunStore, say: Callable[[str], None]
    ) -> None:
        """`kind`: of tracking.also. `say`: called in another thread with a sentence for people."""
        self._config, self._files, self._say = config, files, say
        self._tracker = TrackerProcess(kind, config.tracking.tensorboard_folder, say)
        self._queue = PageQueue(self._tracker, say)
        self._start = 0  # the version that the run begins with
        self._since = 0.0  # results that were made before, in seconds since 1970, it has
        self._began = self._finished = False

    def listen(self, facts: RunFacts, listeners: Listeners) -> None:
        """Hear what the run says."""
        self._start = facts.start
        listeners.on(EnginesReady, lambda event: self._engines_ready(facts, event))
        listeners.on(StepCommitted, lambda event: self._up_to(event.record.step))
        listeners.on(VersionEvaluated, self._version_evaluated)
        listeners.on(RunRolledBack, lambda event: self._end("FINISHED"))
        listeners.on(RunFinished, self._run_finished)
        listeners.on(RunClosed, lambda event: self._close(event.error, event.stopped))

    def listen_to_back_fill(self, listeners: Listeners) -> None:
        """Hear what evaluates versions of the past says, of a run that is done."""
        listeners.on(BackFillBegan, lambda event: self._begin_again())
        listeners.on(VersionEvaluated, self._version_evaluated)
        listeners.on(BackFillEnded, lambda event: self._close(None))

    def _engines_ready(self, facts: RunFacts, event: EnginesReady) -> None:
        run = CurvesOf(
            run=facts.name,
            project=self._config.tracking.experiment,
            group=self._config.name,
            settings=self._config.model_dump(mode="json"),
            tags=tags_of(tracked_run(facts)),
        )
        self._begin(run)
        if event.last is not None:
            self._up_to(event.last.step)

    def _begin_again(self) -> None:
        step, self._since = head(self._files), time.time()
        if step is not None and is_done(self._files, step):
            self._start, origin = start_of(self._files), origin_of(self._files)
            project, settings = self._config.tracking.experiment, stored_settings(self._files)
            parent = None if origin is None else origin.run
            self._begin(stored_run(self._files.run, project, settings, parent))
            self._up_to(step)
            return
        self._say(
            f"The results go to MLflow and the store alone: {self._files.run} has not ended, and "
            f"one process at a time writes to {self._tracker.name}."
        )

    def _begin(self, run: CurvesOf) -> None:
        def begin() -> None:
            self._tracker.start(run)
            self._say(f"Curves also in {self._tracker.name}: {self._tracker.link}")

        self._began = True
        self._queue.start(Write(what="The run's page", do=begin, first=True))

    def _up_to(self, step: int) -> None:
        def log() -> None:
            while (after := max(self._start, self._tracker.last_step or 0) + 1) <= step:
                commit = read_commit(self._files, after)
                self._tracker.log(after, numbers_of(commit), commit.committed_at)

        if self._began:
            self._queue.add(f"Step {step}", log)

    def _version_evaluated(self, event: VersionEvaluated) -> None:
        evaluation = tracked_evaluation(event.result.known_as(event.result.suite, event.version))
        if evaluation.at >= self._since:
            self._log_at(event.version, evaluation.metrics, evaluation.at)

    def _run_finished(self, event: RunFinished) -> None:
        self._log_at(event.step, cost_of_run(event), time.time())
        self._end("FINISHED")

    def _log_at(self, version: int, metrics: Mapping[str, float], at: float) -> None:
        def log() -> None:
            while not self._tracker.log_evaluation(version, metrics, at):
                pass  # the run was begun anew

        if self._began:
            self._queue.add(f"What is known of version {version}", log)

    def _end(self, status: str) -> None:
        def finish() -> None:
            while not self._tracker.finish(status):
                pass

        if self._began and not self._finished:
            self._finished = True
            self._queue.add("The end of the run", finish)

    def _close(self, error: BaseException | None, stopped: bool = False) -> None:
        if error is None:
            self._end("FINISHED")
        else:
            killed = stopped or not isinstance(error, Exception)
            self._end("KILLED" if killed else "FAILED")
        if self._began:
            self._queue.close(PATIENCE, SLOW)
        self._tracker.close()
