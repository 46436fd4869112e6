"""The run in MLflow, fed from the flow: begun in the first step, then a write per step.

What is to be written goes, in order, through a queue with a thread of its own: no step of a run
waits. A write that fails is tried again. While the server does not answer all waits, and people are
told once; a write that a server which answers refuses is left out, and that is told too. A tracker
that cannot be used at all is told, and nothing more is written to it. Whatever is written is the
tracker's only once however often it is tried (storage/tracking/tracker.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol

from configs.environment import working_tree
from configs.storage import TrackingConfig
from storage.audit.samples import WROTE, ending
from storage.evaluations.results import EvaluationResult, evaluations_of
from storage.objects.documents import digest
from storage.objects.errors import ObjectMissing, StoreUnavailable
from storage.runs.commit_log import Commit, read_commit
from storage.runs.retention import is_there
from storage.runs.run_store import Origin, RunStore
from storage.tracking.connection import TrackerUnusable, TrackingAddress, TrackingError
from storage.tracking.cost import DEVICE_HOURS_SO_FAR, MONEY_SO_FAR, SO_FAR
from storage.tracking.machine_samples import MachineSample
from storage.tracking.registry import RegisteredVersion, that_stay, unsaid
from storage.tracking.tracker import (
    TracedSample,
    TrackedData,
    TrackedEvaluation,
    TrackedRun,
    Tracker,
)
from tasks.evaluation.summary import evaluation_metrics
from tasks.reporting.artifacts import shown_samples
from tasks.reporting.mlflow_process import PageWriter
from tasks.run.events import (
    BackFillBegan,
    EnginesReady,
    Event,
    Listeners,
    Note,
    RunBegan,
    RunClosed,
    RunClosing,
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

logger = logging.getLogger(__name__)

P = ParamSpec("P")

TRIES = 3  # of a write, by a server that answers
PAUSES = (1.0, 30.0)  # seconds before the next try: at first, and at most
LOOK = 5.0  # seconds between looks at the server by who waits for the end
ASKED = 60.0  # seconds for which who asks for an answer waits for a server that is away


class Place(Protocol):
    """Where a tracker is."""

    @property
    def name(self) -> str:
        """Of the tracker."""

    @property
    def where(self) -> str:
        """Its name, and at which address."""

    def check_answers(self) -> None:
        """Raise TrackingError, a short sentence, where it does not answer."""


@dataclass(kw_only=True, slots=True, eq=False)
class Write:
    """Something that is to be written."""

    what: str  # for people
    do: Callable[[], Any]
    answer: Future[Any] | None = None  # for who waits for it
    first: bool = False  # nothing else can be written before it, so it is never left out


class PageQueue:
    """See the module's docstring. Its methods may be called from several threads."""

    def __init__(self, place: Place, tell: Callable[[str], object]) -> None:
        """`tell`: called in the queue's thread with a sentence for people."""
        self._place, self._tell = place, tell
        self._writes: deque[Write] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._away: float | None = None  # since when nothing gets through; None: it does
        self._why = ""

    def start(self, first: Write) -> None:
        """Begin with this write."""
        with self._changed:
            self._writes.appendleft(first)
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def add(self, what: str, do: Callable[[], Any]) -> None:
        """Have something written after all that was added before."""
        if not self._closing.is_set():
            self._put(Write(what=what, do=do))

    def ask(self, what: str, do: Callable[[], Any], patience: float | None = None) -> Any:
        """The same, and wait for what it returns; what it raises is raised here.

        TrackingError where the tracker has been away for ASKED seconds. `patience`: seconds after
        which it is not waited for any more, whatever holds it up.
        """
        write = Write(what=what, do=do, answer=Future())
        self._put(write)
        assert write.answer is not None
        began = time.monotonic()
        while True:
            try:
                return write.answer.result(timeout=0.2)
            except TimeoutError:
                if write.answer.done():
                    raise  # it is the write's own
            away, now = self._away, time.monotonic()
            late = patience is not None and now - began > patience
            if late or (away is not None and now - max(began, away) > ASKED):
                self._drop(write)
                raise TrackingError(f"{what} is not in {self._place.name}: {self._why}")

    def close(self, patience: float, most: float = math.inf) -> None:
        """Wait until all is written, and no longer than `patience` seconds for a server that is away.

        `most`: seconds for one that answers. What was not written by then is told.
        """
        began = looked = time.monotonic()
        while self._writes and self._thread is not None:
            with self._changed:
                self._changed.wait(0.2)
            now = time.monotonic()
            if now - looked > LOOK:  # a client may try for minutes before it says so
                looked = now
                try:
                    self._place.check_answers()
                except TrackingError as error:
                    self._failed(error)
            away = self._away
            if away is not None and now - max(began, away) > patience:
                break
            if now - began > most:
                self._why = self._why or f"it took longer than {most:g} s."
                break
        with self._changed:
            unwritten = len(self._writes)
            self._writes.clear()
        self._closing.set()
        if unwritten:
            self._tell(
                f"{self._place.where} has not heard of all ({unwritten} writes are left): "
                f"{self._why} The store has all of it: the rest is written when the run goes on "
                "(--resume), and refrain curves shows it at any time."
            )

    def _put(self, write: Write) -> None:
        with self._changed:
            self._writes.append(write)
            self._changed.notify_all()

    def _drop(self, write: Write) -> None:
        with self._changed:
            if write in self._writes:
                self._writes.remove(write)
            self._changed.notify_all()

    def _work(self) -> None:
        while not self._closing.is_set():
            with self._changed:
                if not self._writes:
                    self._changed.wait(1.0)
                    continue
                write = self._writes[0]
            self._written(write)
            self._drop(write)

    def _written(self, write: Write) -> None:
        """Do it, however often it takes, or leave it out."""
        tries, pause = 0, PAUSES[0]
        while not self._closing.is_set():
            try:
                value = write.do()
            except TrackerUnusable as error:
                self._give_up(error)
                return
            except Exception as error:  # told, or raised where it is waited for
                if self._closing.is_set():
                    return
                tries += 1
                answers = self._answers()
                if write.answer is not None and (answers or not isinstance(error, TrackingError)):
                    write.answer.set_exception(error)
                    return
                waits = write.first or isinstance(error, StoreUnavailable)
                if answers and tries >= TRIES and not waits:
                    logger.info("%s was refused", write.what, exc_info=error)
                    self._tell(f"{write.what} is not in {self._place.name}: {error}")
                    return
                if waits or not answers:
                    self._failed(error)
                with self._changed:
                    gone = write not in self._writes
                if gone or self._closing.wait(pause):
                    return
                pause = min(2 * pause, PAUSES[1])
            else:
                self._got_through()
                if write.answer is not None:
                    write.answer.set_result(value)
                return

    def _answers(self) -> bool:
        try:
            self._place.check_answers()
        except TrackingError:
            return False
        return True

    def _failed(self, error: Exception) -> None:
        self._why = str(error)
        if self._away is None:
            self._away = time.monotonic()
            name = self._place.name
            self._tell(f"{error} The run goes on; what {name} misses follows when it answers.")

    def _give_up(self, error: Exception) -> None:
        """Write nothing more."""
        self._closing.set()
        with self._changed:
            self._writes.clear()
        self._tell(f"{error} The run goes on without {self._place.name}.")

    def _got_through(self) -> None:
        if self._away is not None:
            seconds = time.monotonic() - self._away
            self._away = None
            self._tell(f"{self._place.where} answers again, after {seconds:.0f} s.")


KEPT = 2000  # samples that wait while MLflow is away; the oldest go first


class MachineWatch:
    """A thread that looks at them, begun. What it saw is written by the page's queue."""

    def __init__(
        self,
        machines: Callable[[], Sequence[MachineSample]],
        log: Callable[[Sequence[MachineSample]], None],
        queue: PageQueue,
        every: float,
    ) -> None:
        """`machines`: looks at them; `log`: writes samples; `every`: seconds between looks."""
        self._machines, self._log, self._queue, self._every = machines, log, queue, every
        self._samples: deque[MachineSample] = deque(maxlen=KEPT)
        self._queued = False  # whether the queue has a write that has not been tried
        self._stop = threading.Event()
        threading.Thread(target=self._look, name="machines", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def _look(self) -> None:
        while not self._stop.wait(self._every):
            samples = self._machines()
            self._samples.extend(samples)
            if samples and not self._queued:
                self._queued = True
                self._queue.add("What machines did", self._write)

    def _write(self) -> None:
        """Those that wait; they are dropped once they are written."""
        self._queued = False
        samples = list(self._samples)
        self._log(samples)
        for _ in range(min(len(samples), len(self._samples))):
            self._samples.popleft()


PLOT = "plots/progress.png"
START_DELAY = 5.0  # seconds
LINK_PATIENCE = 15.0  # seconds for which a run that ends waits for the address of its page
LET_GO_PATIENCE = 10.0  # seconds for which the removal of old versions waits for MLflow
PATIENCE = 120.0  # seconds for which a run that has ended waits for a server that is away
PATIENCE_AT_FAILURE = 10.0  # the same of one that failed or was stopped


class RunTracker:
    """A run's page in MLflow; says which versions are registered (tasks/run/events.py:Tracking).

    It is begun when it is first written to, or START_DELAY seconds after the engines are ready:
    importing MLflow takes two seconds of CPU, which a small model's first step needs itself. Another
    process writes it (mlflow_process.py), in the order of a queue that no step waits for
    (PageQueue): whatever becomes of MLflow, the run goes on.
    """

    def __init__(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        """`say`: called in another thread with a sentence for people about MLflow."""
        self._facts = facts
        self._tracker = PageWriter(facts.config.tracking, say)
        self._queue = PageQueue(TrackingAddress.of(facts.config.tracking.uri), say)
        self._needed, self._page = threading.Event(), threading.Event()
        self._began = self._finished = False
        self._machines: Callable[[], Sequence[MachineSample]] | None = None
        self._watch: MachineWatch | None = None
        self._numbers: dict[int, str | None] = {}  # of versions; None of one that waits for it
        self._unknown: set[int] = set()  # versions of which the registry has not been asked yet
        # Registered versions that retention removes, as the registry was when it was asked last.
        self._let_go: frozenset[int] = frozenset()

    def listen(self, listeners: Listeners) -> None:
        """Hear what the run says."""
        listeners.on(RunBegan, self.run_began)
        listeners.on(EnginesReady, self.engines_ready)
        listeners.on(StepCommitted, self.step_committed)
        listeners.on(SnapshotStored, lambda event: self._register_later(event.record))
        listeners.on(VersionEvaluated, self.version_evaluated)
        listeners.on(StepsEnded, self.steps_ended)
        listeners.on(RunRolledBack, self.rolled_back)
        listeners.on(RunFinished, self.run_finished)
        listeners.on(RunClosing, lambda event: self._stop_watching())
        listeners.on(RunClosed, lambda event: self.finish(event.error, event.stopped))

    def run_began(self, event: RunBegan) -> None:
        """Keep how its machines are asked."""
        self._machines = event.machines

    def engines_ready(self, event: EnginesReady) -> None:
        """Begin the page in the background, or go on with it. To be called inside the flow run."""
        tracked = tracked_run(self._facts)

        def begin() -> None:
            self._needed.wait(START_DELAY)
            self._tracker.start(tracked)
            self._page.set()
            self._catch_up(event.last, event.snapshot)
            self._unknown = set()

        self._began = True
        if event.last is not None:
            self._unknown = set(self._facts.files.versions())
        self._queue.start(Write(what="The run's page", do=begin, first=True))
        if (every := self._facts.config.tracking.system_metrics) and self._machines is not None:

            def log(samples: Sequence[MachineSample]) -> None:
                self._tracker.call(Tracker.log_machines, samples)

            self._watch = MachineWatch(self._machines, log, self._queue, every)

    def _catch_up(self, newest: Commit | None, snapshot: bool) -> None:
        """What a resumed run did before: its versions, and what MLflow never heard of.

        A step is committed before MLflow is told of it and its version, so a run may die in between.
        `newest`: the last commit; a fork's may be its parent's. `snapshot`: of it one is stored.
        """
        start = self._facts.start
        if newest is None or newest.step <= start:
            return
        for step in range(max(start, self._tracker.last_step or 0) + 1, newest.step + 1):
            commit = read_commit(self._facts.files, step)
            self._log(commit)
            self._trace_later(commit)
        self._numbers |= self._tracker.call(Tracker.registered)
        if snapshot and self._numbers.get(newest.version_out.version) is None:
            self._register(newest)
        self._say_what_is_gone()
        self._ask_what_stays()

    def step_committed(self, event: StepCommitted) -> None:
        """Record a committed step, and its version where the trainers' state is stored."""
        record = event.record
        self._add(f"Step {record.step}", lambda: self._log(record))
        self._trace_later(record)
        if event.snapshot:
            self._register_later(record)

    def _log(self, commit: Commit) -> None:
        """A step's metrics, after a mark where they mean something else than those before."""
        metrics = numbers_of(commit)
        if marks := marked(metrics):
            self._tracker.call(Tracker.tag, f"refrain.meaning_changed.{commit.step}", marks)
        self._tracker.call(
            Tracker.log_step,
            commit.step,
            metrics,
            at=commit.committed_at,
            lineage=newest_tags(commit),
        )

    def _trace_later(self, commit: Commit) -> None:
        def trace() -> None:
            if traced := traced_samples(self._facts, commit):
                self._tracker.call(Tracker.log_traces, traced)

        if self._facts.config.tracking.traced_samples:
            self._add(f"Samples of step {commit.step}", trace)

    def register(self, commit: Commit) -> str:
        """Put the policy version that a step made into the model registry; its number there.

        Waits for it; TrackingError where MLflow does not take it.
        """
        what = f"Version {commit.version_out.version}"
        return str(self._ask(what, lambda: self._register(commit)))

    def _register_later(self, commit: Commit) -> None:
        self._numbers.setdefault(commit.version_out.version, None)
        self._add(f"Version {commit.version_out.version}", lambda: self._register(commit))
        self._add("Which versions stay", self._ask_what_stays)

    def _register(self, commit: Commit) -> str:
        step, weights, store = commit.step, commit.version_out, self._facts.store
        evaluated = evaluations_of(self._facts.files, version=weights.version)
        number = self._tracker.call(
            Tracker.register_version,
            weights.version,
            uri=store.url(weights.key),
            digest=weights.digest,
            step=step,
            store_uri=store.uri,
            lineage=version_tags(commit),
            metrics=numbers_of(commit),
            at=commit.committed_at,
            evaluations=[tracked_evaluation(result) for result in evaluated],
        )
        self._numbers[weights.version] = number
        return number

    def retained(self) -> Collection[int]:
        """The registered policy versions that retention leaves, by the settings and the aliases.

        No step waits for MLflow, which is asked after each version that is registered: what it was
        not asked about stays. Before one goes it is asked again (`let_go`).
        """
        return self.registered.keys() - self._let_go

    def let_go(self, versions: Collection[int]) -> Collection[int]:
        """Those of these policy versions that may be removed now, which the registry says first.

        Waits for MLflow, in the background of a step; where it does not answer soon, all of those
        that are registered stay until it has been asked again.
        """
        registered = [version for version in versions if version in self._numbers]
        if not registered:
            return versions
        what = "Which versions are to be removed"
        try:
            gone = self._queue.ask(
                what, lambda: self._tracker.call(Tracker.let_go, registered), LET_GO_PATIENCE
            )
        except TrackingError:
            gone = ()
            self._let_go = frozenset()
        return {*versions} - ({*registered} - {*gone})

    def removed(self, versions: Collection[int]) -> None:
        """Have the registry say that the files of these policy versions are gone."""
        if gone := [version for version in versions if version in self._numbers]:
            self._write("The versions that were removed", Tracker.tag_removed, gone)

    def _say_what_is_gone(self) -> None:
        """What a process removed that died before it could say so, and what it left after all."""
        versions = self._tracker.call(Tracker.registered_versions)
        gone = unsaid(versions, partial(is_there, self._facts.files))
        if gone:
            self._tracker.call(Tracker.tag_removed, gone)
        self._take_back(versions, {version.version for version in versions} - {*gone})

    def _take_back(self, versions: Sequence[RegisteredVersion], staying: Collection[int]) -> None:
        """Of what was to go and stays, by other settings or an alias, have it said no longer."""
        if versions_back := [
            version.version for version in versions if version.going and version.version in staying
        ]:
            self._tracker.call(Tracker.take_back, versions_back)

    def _ask_what_stays(self) -> None:
        store = self._facts.config.store
        if store.keep_registered is None or len(self._numbers) <= store.keep_registered:
            return
        versions = self._tracker.call(Tracker.registered_versions)
        stay = that_stay(versions, store.keep_registered, store.keep_registered_days, time.time())
        self._let_go = frozenset({version.version for version in versions} - stay)
        self._take_back(versions, stay)

    def version_evaluated(self, event: VersionEvaluated) -> None:
        """Record what a suite says of a policy version."""
        evaluated = tracked_evaluation(event.result.known_as(event.result.suite, event.version))
        what = f"The result of {evaluated.suite} on version {evaluated.version}"
        self._write(what, Tracker.log_evaluation, evaluated)

    def steps_ended(self, event: StepsEnded) -> None:
        """Keep the picture of the curves."""
        self._write("The picture of the curves", Tracker.log_file, PLOT, event.curves)

    def rolled_back(self, event: RunRolledBack) -> None:
        """Record where the run goes on, and end its page."""
        self.tag("refrain.rolled_back_to", str(event.back_to))
        self.tag("refrain.rolled_back_by", event.guard)
        self.tag("refrain.continued_as", event.child)
        self._end("FINISHED")

    def run_finished(self, event: RunFinished) -> None:
        """Record what all of the run cost, up to its end after the last step, and end its page."""
        cost, now = cost_of_run(event), time.time()
        self._write("What the run cost", Tracker.log_metrics, event.step, cost, at=now)
        self._end("FINISHED")

    def tag(self, name: str, value: str) -> None:
        """Have a tag written on the run's page."""
        self._write(f"The tag {name}", Tracker.tag, name, value)

    @property
    def registered(self) -> Mapping[int, str | None]:
        """Policy version -> its number in the registry, None of one that waits for it.

        Until the registry of a resumed run has been asked, every version is here, and is kept.
        """
        return {**dict.fromkeys(self._unknown), **self._numbers}

    @property
    def model_name(self) -> str:
        """Name of the run's model in the registry; waits until all that was to be written is.

        TrackingError where MLflow does not answer.
        """
        return str(self._ask("The name of the model", lambda: self._tracker.model_name))

    @property
    def link(self) -> str:
        """Where a person sees the run; where MLflow is, if its page does not begin in time."""
        self._needed.set()
        self._page.wait(LINK_PATIENCE)
        return self._tracker.link or self._facts.config.tracking.uri

    def finish(self, error: BaseException | None, stopped: bool = False) -> None:
        """End the page: finished, failed, or killed by Ctrl-C and cancellation (`stopped`).

        Waits until all is written, for a server that is away no longer than PATIENCE seconds.
        """
        self._stop_watching()
        if not self._began:
            return
        if error is None:
            self._end("FINISHED")
        else:
            killed = stopped or not isinstance(error, Exception)
            self._end("KILLED" if killed else "FAILED")
        self._queue.close(PATIENCE if error is None else PATIENCE_AT_FAILURE)

    def _end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        if not self._finished:
            self._finished = True
            self._stop_watching()
            self._write("The end of the run", Tracker.finish, status)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _add(self, what: str, do: Callable[[], object]) -> None:
        self._needed.set()
        self._queue.add(what, do)

    def _write(
        self,
        what: str,
        method: Callable[Concatenate[Tracker, P], object],
        /,
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> None:
        self._add(what, lambda: self._tracker.call(method, *arguments, **keywords))

    def _ask(self, what: str, do: Callable[[], object]) -> object:
        self._needed.set()
        return self._queue.ask(what, do)


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
            exists = page.reopen(run, self._files.store.uri, record_of(self._files))
        except TrackingError as error:
            self._warn(f"The results go to the store alone: {error}")
            return
        if not exists:
            self._warn(
                f"MLflow at {self._config.uri} has no page of {run}: the results go to the store "
                "alone. Give tracking.uri=… of the place that has it."
            )
            return
        self._page = page

    def version_evaluated(self, event: VersionEvaluated) -> None:
        """Record what a suite says of a policy version."""
        if self._page is not None:
            result = event.result.known_as(event.result.suite, event.version)
            self._page.log_evaluation(tracked_evaluation(result))

    def _warn(self, text: str) -> None:
        self._tell(Note(text=text, warning=True))


def tracked_run(run: RunFacts) -> TrackedRun:
    """What trackers are told of a run. To be called inside the flow run."""
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
        record=record_of(run.files),
        parent_record=None
        if run.origin is None
        else record_of(RunStore(run.store, run.origin.run)),
        store_options=run.config.store.options,
    )


def record_of(files: RunStore) -> str | None:
    """Digest of run.json, which is written once and goes with the run wherever its store is moved."""
    try:
        return digest(files.store.read(files.run_json_key))
    except ObjectMissing:
        return None


def tracked_evaluation(result: EvaluationResult) -> TrackedEvaluation:
    """A suite's result as MLflow keeps it."""
    return TrackedEvaluation(
        version=result.version,
        weights_digest=result.weights.digest,
        suite=result.suite,
        rows_digest=result.on,
        metrics=evaluation_metrics(result),
        at=result.made_at,
    )


def cost_of_run(event: RunFinished) -> dict[str, float]:
    """The metrics cost/run/… of a run that has finished."""
    total = {name: value for name, value in event.cost.items() if name.startswith(SO_FAR)}
    return {name.replace(SO_FAR, "cost/run/"): value for name, value in total.items()}


def traced_samples(facts: RunFacts, commit: Commit) -> list[TracedSample]:
    """Some samples of a step, best to worst; none where they are no longer in the store."""
    count = facts.config.tracking.traced_samples
    return [
        TracedSample(
            sample=str(sample.origin.sample),
            step=commit.step,
            at=commit.committed_at,
            prompt=sample.prompt,
            response=sample.response,
            reward=sample.origin.reward,
            tokens=sample.origin.tokens,
            ending=ending(sample.origin),
            parts=[(who, text) for who, text in sample.parts if who in WROTE],
            more={"refrain.version": str(commit.version_in.version)},
        )
        for sample in shown_samples(facts.files, commit, count)
    ]


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
        "refrain.reward_code": ", ".join(sorted(commit.reward_code)),
        "refrain.prompts_trained_so_far": str(commit.ledger.trained),
    }


def newest_tags(commit: Commit) -> dict[str, str]:
    """Tags of the run's page that tell of its newest policy version."""
    newest = {f"{name}.last": value for name, value in version_tags(commit).items()}
    return {**newest, "refrain.digest.last": commit.version_out.digest}
