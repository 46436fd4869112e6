"""The run in MLflow, fed from the flow: begun in the first step, then a write per step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from configs.storage import TrackingConfig
from storage.runs.commit_log import Commit, read_commit
from storage.runs.origins import Origin
from storage.runs.run_store import RunStore
from storage.runs.working_tree import working_tree
from storage.tracking.connection import TrackingError
from storage.tracking.cost import DEVICE_HOURS_SO_FAR, MONEY_SO_FAR, SO_FAR
from storage.tracking.registered_versions import that_stay
from storage.tracking.tracked_run import TrackedData, TrackedRun
from storage.tracking.tracker import Tracker
from tasks.evaluation.summary import evaluation_metrics
from tasks.reporting.mlflow_process import PageWriter
from tasks.run.events import (
    BackFillBegan,
    EnginesReady,
    Event,
    Listeners,
    Note,
    RunClosed,
    RunFinished,
    RunRolledBack,
    SnapshotStored,
    StepCommitted,
    StepsEnded,
    VersionEvaluated,
)
from tasks.run.facts import RunFacts
from tasks.run.flow_run import flow_run_id, flow_run_url
from tasks.run.meaning_changes import marked
from tasks.run.metrics import numbers_of

PLOT = "plots/progress.png"
START_DELAY = 5.0  # seconds
LONGEST_TAG = 2000  # characters; MLflow takes 5000 on a server


class RunTracker:
    """A run's page in MLflow; says which versions are registered (tasks/run/reports.py:Tracking).

    It is begun in the background when it is first written to, or START_DELAY seconds after the
    engines are ready: importing MLflow takes two seconds of CPU, which a small model's first step
    needs itself. Another process writes it (tasks/reporting/mlflow_process.py).
    """

    def __init__(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        """`say`: called in another thread with a sentence for people where MLflow is waited for."""
        self._facts = facts
        self._tracker = PageWriter(facts.config.tracking, say)
        self._needed = threading.Event()
        self._started = threading.Event()
        self._error: Exception | None = None
        self._finished = False
        self.registered: dict[int, str] = {}  # policy version -> its number in the registry
        # Of the registered versions when MLflow was asked last: which those were, and which stay.
        self._asked: tuple[frozenset[int], frozenset[int]] = frozenset(), frozenset()

    def listen(self, listeners: Listeners) -> None:
        """Hear what the run says."""
        listeners.on(EnginesReady, self.engines_ready)
        listeners.later(StepCommitted, self.step_committed)
        listeners.later(SnapshotStored, lambda event: self.register(event.record))
        listeners.on(VersionEvaluated, self.version_evaluated)
        listeners.on(StepsEnded, lambda event: self._ready().log_file(PLOT, event.curves))
        listeners.on(RunRolledBack, self.rolled_back)
        listeners.on(RunFinished, self.run_finished)
        listeners.on(RunClosed, lambda event: self.finish(event.error))

    def engines_ready(self, event: EnginesReady) -> None:
        """Begin the page in the background, or go on with it. To be called inside the flow run."""
        tracked = self._tracked()

        def begin() -> None:
            self._needed.wait(START_DELAY)
            try:
                self._tracker.start(tracked)
                self._catch_up(event.last, event.snapshot)
            except Exception as error:  # raised again in the flow's thread by `_ready`
                self._error = error
            finally:
                self._started.set()

        threading.Thread(target=begin, name="mlflow", daemon=True).start()

    def _catch_up(self, newest: Commit | None, snapshot: bool) -> None:
        """What a resumed run did before: its versions, and what MLflow never heard of.

        A step is committed before MLflow is told of it and its version, so a run may die in between.
        `newest`: the last commit; a fork's may be its parent's. `snapshot`: of it one is stored.
        """
        start = self._facts.start
        if newest is None or newest.step <= start:
            return
        for step in range(max(start, self._tracker.last_step or 0) + 1, newest.step + 1):
            self._log(self._tracker, read_commit(self._facts.files, step))
        self.registered = self._tracker.registered()
        if snapshot and newest.version_out.version not in self.registered:
            self._register(self._tracker, newest)

    def step_committed(self, event: StepCommitted) -> None:
        """Record a committed step, and its version where the trainers' state is stored."""
        self._log(self._ready(), event.record)
        if marks := marked(numbers_of(event.record)):
            self.tag(f"refrain.meaning_changed.{event.record.step}", marks)
        if event.snapshot:
            self.register(event.record)

    def _log(self, tracker: PageWriter, commit: Commit) -> None:
        tracker.log_step(
            commit.step, numbers_of(commit), at=commit.committed_at, lineage=newest_tags(commit)
        )

    def register(self, commit: Commit) -> str:
        """Put the policy version that a step made into the model registry; its number there."""
        return self._register(self._ready(), commit)

    def _register(self, tracker: PageWriter, commit: Commit) -> str:
        step, weights, store = commit.step, commit.version_out, self._facts.store
        number = tracker.register_version(
            weights.version,
            uri=store.url(weights.key),
            digest=weights.digest,
            step=step,
            store_uri=store.uri,
            lineage=version_tags(commit),
        )
        self.registered[weights.version] = number
        return number

    def retained(self) -> Collection[int]:
        """The registered policy versions that retention leaves, by the settings and the aliases.

        MLflow is asked once for each version that is registered: one that it then lets go is removed
        at once, and one that gets an alias later is among those that stay.
        """
        store, registered = self._facts.config.store, frozenset(self.registered)
        if store.keep_registered is None or len(registered) <= store.keep_registered:
            return registered
        if self._asked[0] != registered:
            versions = self._ready().registered_versions()
            stay = that_stay(
                versions, store.keep_registered, store.keep_registered_days, time.time()
            )
            self._asked = registered, frozenset(stay)
        return self._asked[1]

    def removed(self, versions: Collection[int]) -> None:
        """Have the registry say that the files of these policy versions are gone."""
        if gone := [version for version in versions if version in self.registered]:
            self._ready().tag_removed(gone)

    def version_evaluated(self, event: VersionEvaluated) -> None:
        """Record what a suite says of a policy version."""
        result = event.result
        self._ready().log_metrics(event.version, evaluation_metrics(result), at=result.made_at)

    def rolled_back(self, event: RunRolledBack) -> None:
        """Record where the run goes on, and end its page."""
        self.tag("refrain.rolled_back_to", str(event.back_to))
        self.tag("refrain.rolled_back_by", event.guard)
        self.tag("refrain.continued_as", event.child)
        self.finish(None)

    def run_finished(self, event: RunFinished) -> None:
        """Record what all of the run cost, up to its end after the last step, and end its page."""
        total = {name: value for name, value in event.cost.items() if name.startswith(SO_FAR)}
        shown = {name.replace(SO_FAR, "cost/run/"): value for name, value in total.items()}
        self._ready().log_metrics(event.step, shown, at=time.time())
        self.finish(None)

    def tag(self, name: str, value: str) -> None:
        """Write a tag on the run's page."""
        self._ready().tag(name, value)

    @property
    def model_name(self) -> str:
        """Name of the run's model in the registry."""
        return self._ready().model_name

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
        run = self._facts
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


class ReopenedPage:
    """The page of a run of the past, to which results of its versions are added, if it is found."""

    def __init__(
        self, config: TrackingConfig, files: RunStore, tell: Callable[[Event], object]
    ) -> None:
        """`tell`: by which people are told where there is none."""
        self._config, self._files, self._tell = config, files, tell
        self._page: Tracker | None = None

    def listen(self, listeners: Listeners) -> None:
        """Hear what evaluates them says."""
        listeners.on(BackFillBegan, lambda event: self.reopen())
        listeners.on(VersionEvaluated, self.version_evaluated)

    def reopen(self) -> None:
        """Look for it; this imports MLflow."""
        page, run = Tracker(self._config), self._files.run
        try:
            found = page.reopen(run, self._files.store.uri)
        except TrackingError as error:
            self._warn(f"The results go to the store alone: {error}")
            return
        if not found:
            self._warn(
                f"MLflow at {self._config.uri} has no page of {run}: the results go to the store "
                "alone. Give tracking.uri=… of the place that has it."
            )
            return
        self._page = page

    def version_evaluated(self, event: VersionEvaluated) -> None:
        """Record what a suite says of a policy version."""
        if self._page is not None:
            result = event.result
            self._page.log_metrics(event.version, evaluation_metrics(result), at=result.made_at)

    def _warn(self, text: str) -> None:
        self._tell(Note(text=text, warning=True))


def rollback_of(origin: Origin | None) -> str | None:
    """Why a run goes on from an earlier step of another one, as its page says it."""
    cause = None if origin is None else origin.rollback
    if cause is None:
        return None
    return f"{cause.number}, of {cause.run} after its step {cause.after}: {cause.why}"


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
