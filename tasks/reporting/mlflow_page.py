"""The run in MLflow, fed from the flow: begun in the first step, then a write per step."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from storage.prompts.cursor import Cursor
from storage.runs.commit_log import read_commit
from storage.runs.curves import History, read_history, shown
from storage.runs.origins import Origin, start_of
from storage.runs.working_tree import working_tree
from storage.tracking.cost import DEVICE_HOURS_SO_FAR, MONEY_SO_FAR, SO_FAR
from storage.tracking.plots import progress_png
from storage.tracking.tracked_run import TrackedData, TrackedRun
from tasks.reporting.flow_run import flow_run_id, flow_run_url
from tasks.reporting.mlflow_process import PageWriter
from tasks.results import Metrics

if TYPE_CHECKING:
    from storage.evaluations.results import EvaluationResult
    from storage.runs.commit_log import Commit
    from tasks.reporting.run_view import RunView

PLOT = "plots/progress.png"
START_DELAY = 5.0  # seconds
LONGEST_TAG = 2000  # characters; MLflow takes 5000 on a server


class RunTracker:
    """A run's page in MLflow.

    It is begun in the background when it is first written to, or START_DELAY seconds after `start`:
    importing MLflow takes two seconds of CPU, which a small model's first step needs itself. Another
    process writes it (tasks/reporting/mlflow_process.py).
    """

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._tracker = PageWriter(run.config.tracking, run.terminal.say)
        self._needed = threading.Event()
        self._started = threading.Event()
        self._error: Exception | None = None
        self._finished = False
        self.history: History = []  # what is shown of each step
        self.registered: dict[int, str] = {}  # policy version -> its number in the registry; kept

    def start(self) -> None:
        """Begin the page in the background, or go on with it. To be called inside the flow run."""
        tracked, last = self._tracked(), self._run.last

        def begin() -> None:
            self._needed.wait(START_DELAY)
            try:
                self._tracker.start(tracked)
                self._catch_up(last)
            except Exception as error:  # raised again in the flow's thread by `_ready`
                self._error = error
            finally:
                self._started.set()

        threading.Thread(target=begin, name="mlflow", daemon=True).start()

    def _catch_up(self, newest: Commit | None) -> None:
        """What a resumed run did before: its curves, its versions, and what MLflow never heard of.

        A step is committed before MLflow is told of it and its version, so a run may die in between.
        `newest`: the last commit; a fork's may be its parent's.
        """
        files = self._run.files
        start = start_of(files)
        if newest is None or newest.step <= start:
            return
        head = newest.step
        self.history = read_history(files, head)
        for step in range(max(start, self._tracker.last_step or 0) + 1, head + 1):
            commit = read_commit(files, step)
            self._log(self._tracker, commit, metrics_of(commit))
        self.registered = self._tracker.registered()
        cursor = Cursor.from_json(newest.cursor)
        due = self._run.snapshot_due(head, cursor, len(newest.carried))
        if due and newest.version_out.version not in self.registered:
            self._register(self._tracker, newest)

    def step(self, commit: Commit, metrics: Metrics) -> None:
        """Record a committed step."""
        tracker = self._ready()
        self.history.append((commit.step, shown(metrics)))
        self._log(tracker, commit, metrics)

    def _log(self, tracker: PageWriter, commit: Commit, metrics: Metrics) -> None:
        tracker.log_step(commit.step, metrics, at=commit.committed_at, lineage=newest_tags(commit))

    def register(self, commit: Commit) -> None:
        """Put the policy version that a step made into the model registry."""
        self._register(self._ready(), commit)

    def _register(self, tracker: PageWriter, commit: Commit) -> None:
        step, weights = commit.step, commit.version_out
        number = tracker.register_version(
            weights.version,
            uri=self._run.store.url(weights.key),
            digest=weights.digest,
            step=step,
            store_uri=self._run.store.uri,
            lineage=version_tags(commit),
        )
        self.registered[weights.version] = number

    def evaluated(self, result: EvaluationResult, version: int) -> None:
        """Record what a suite says of a policy version."""
        self._ready().log_metrics(version, evaluation_metrics(result), at=result.made_at)

    def ended(self, step: int, cost: Metrics) -> None:
        """Record what all of the run cost, up to its end after the last step."""
        total = {name: value for name, value in cost.items() if name.startswith(SO_FAR)}
        shown = {name.replace(SO_FAR, "cost/run/"): value for name, value in total.items()}
        self._ready().log_metrics(step, shown, at=time.time())

    def tag(self, name: str, value: str) -> None:
        """Write a tag on the run's page."""
        self._ready().tag(name, value)

    @property
    def model_name(self) -> str:
        """Name of the run's model in the registry."""
        return self._ready().model_name

    def number_of(self, version: int) -> str:
        """Number in the registry of a policy version, which is registered if it is not yet."""
        if version not in self.registered:
            last = self._run.last
            assert last is not None and last.version_out.version == version
            self.register(last)
        return self.registered[version]

    def plot(self) -> bytes | None:
        """The run's curves as a PNG, kept with the run; None before the first step."""
        if not self.history:
            return None
        steps, metrics = zip(*self.history, strict=True)
        image = progress_png(list(steps), list(metrics), title=self._run.name)
        self._ready().log_file(PLOT, image)
        return image

    @property
    def link(self) -> str:
        """Where a person sees the run."""
        return self._ready().link

    def finish(self, error: BaseException | None) -> None:
        """End the page: finished, failed, or killed by Ctrl-C and cancellation."""
        if not self._started.wait(timeout=0) or self._error is not None or self._finished:
            return
        self._finished = True
        if error is None:
            self._tracker.finish("FINISHED")
        else:
            self._tracker.finish("FAILED" if isinstance(error, Exception) else "KILLED")

    def _ready(self) -> PageWriter:
        self._needed.set()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self._tracker

    def _tracked(self) -> TrackedRun:
        run = self._run
        return TrackedRun(
            run=run.name,
            store_uri=run.store.uri,
            settings=run.config.model_dump(mode="json"),
            data=TrackedData(
                name=run.source.name,
                digest=run.source.digest,
                source=run.config.data.source.model_dump(mode="json"),
                rows=len(run.source),
            ),
            model_name=run.config.name,
            flow_run_id=str(flow_run_id() or "") or None,
            flow_run_url=flow_run_url(),
            forked_from=None if run.origin is None else run.origin.run,
            forked_at=None if run.origin is None else run.origin.step,
            rollback=rollback_of(run.origin),
            git_commit=None if (tree := working_tree(Path.cwd())) is None else tree.commit,
        )


def rollback_of(origin: Origin | None) -> str | None:
    """Why a run goes on from an earlier step of another one, as its page says it."""
    cause = None if origin is None else origin.rollback
    if cause is None:
        return None
    return f"{cause.number}, of {cause.run} after its step {cause.after}: {cause.why}"


def evaluation_metrics(result: EvaluationResult) -> Metrics:
    """The metrics of an evaluation under the names that people see."""
    cost = {f"cost/{name}": value for name, value in result.cost.items()}
    return {f"eval/{result.suite}/{name}": value for name, value in (result.metrics | cost).items()}


def metrics_of(commit: Commit) -> Metrics:
    """The metrics of a committed step that are numbers."""
    return {name: value for name, value in commit.metrics.items() if value is not None}


def version_tags(commit: Commit) -> dict[str, str]:
    """What a policy version was made of, as MLflow's tags."""
    batch = commit.refs["batch"]
    cost = {
        "refrain.device_hours": commit.metrics.get(DEVICE_HOURS_SO_FAR),
        "refrain.money": commit.metrics.get(MONEY_SO_FAR),
    }
    return {
        **{name: f"{value:.6g}" for name, value in cost.items() if value is not None},
        "refrain.sampled_with": commit.version_in.digest,
        "refrain.samples_trained": str(len(batch)),
        "refrain.batch": ", ".join(sorted(batch.objects))[:LONGEST_TAG],
        "refrain.reward_code": ", ".join(sorted(commit.reward_code)),
        "refrain.prompts_trained_so_far": str(commit.ledger.trained),
    }


def newest_tags(commit: Commit) -> dict[str, str]:
    """Tags of the run's page that tell of its newest policy version."""
    newest = {f"{name}.last": value for name, value in version_tags(commit).items()}
    return {**newest, "refrain.digest.last": commit.version_out.digest}
