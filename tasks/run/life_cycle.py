"""How a run starts and ends: its hold on the store, its engines, what people see of it.

Ctrl-C, SIGTERM and a cancel from the dashboard each end every wait of the run at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TypeVar
from uuid import UUID

import httpx
import numpy as np
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.states import Cancelled, State

from configs.grpo import warnings_of
from engines.data.contract import Scorer
from engines.failures import ClusterLost, InfrastructureError
from engines.workers.cluster import Cluster
from storage.prompts.datasets import open_source
from storage.runs.commit_log import history
from storage.runs.curves import History
from storage.runs.live import DataOver, End, workers_ended, write_end
from storage.runs.retention import clear
from storage.runs.run_store import RunStore
from storage.runs.seen_rows import write_rows
from storage.tracking.plots import TimelineCall, progress_png, timeline_png
from tasks.results import RunSummary
from tasks.run.events import (
    Note,
    Reporting,
    RunBegan,
    RunClosed,
    RunClosing,
    RunEnded,
    RunFinished,
    RunStopped,
    StepsEnded,
)
from tasks.run.facts import OpenedRun, Position
from tasks.run.features import tidy
from tasks.run.flow_options import one_client
from tasks.run.flow_run import flow_run_id, flow_run_url, name_after
from tasks.run.meaning_changes import code_sentence, meaning_sentence
from tasks.run.metrics import cost_at_end
from tasks.run.opening import begin, open_run, take_over
from tasks.run.roles import SCORER
from tasks.run.run import Run
from tasks.run.run_log import folder_of, kept

T = TypeVar("T")

ROWS_AT_ONCE = 100_000  # of the data, whose digests one call makes in some seconds


class BranchEnded(Exception):
    """A run has ended after a step, and another one goes on from an earlier step of it."""

    def successor(self, run: Run) -> contextlib.AbstractContextManager[Run]:
        """The run that goes on, for a body; `run` is ended before."""
        raise NotImplementedError


@contextlib.contextmanager
def started(
    opened: OpenedRun,
    reporting: Reporting,
    last_words: Callable[[], object] = lambda: None,
    cluster: Cluster | None = None,
    waits: bool = False,
) -> Iterator[Run]:
    """Take a run over, begin it, and start its engines in the background; all ends with the body.

    `reporting`: who is told of it. `last_words` are said before a process that cannot be stopped in
    order ends itself. `cluster`: workers on which the engines start; None: on new ones. `waits`:
    for the end of another process that may have been killed. Raises LeaseHeld.
    """
    with contextlib.ExitStack() as failed:
        if cluster is not None:
            failed.callback(cluster.close)
        lease, position = take_over(opened, waits)
        failed.callback(lease.release)
        begin(opened, position)
        run = Run(opened, lease, position, reporting)
        if (owner := _before(opened, position)) is not None:
            before = (opened.files, opened.config, position.last, owner)
            for sentence in filter(None, (meaning_sentence(*before), code_sentence(*before))):
                run.tell(Note(text=sentence, warning=True))
        failed.pop_all()
    for line in warnings_of(opened.config):
        run.tell(Note(text=f"Warning: {line}", warning=True))
    failure: BaseException | None = None
    with kept(folder_of(run.name)), signals_end(run.cancelled, last_words):
        try:
            with set_closes(run.cancelled, run.engines.close):
                run.engines.launch(cluster)
                yield run
        except BaseException as error:
            failure = error
            raise
        finally:
            close(run, failure)


def _before(opened: OpenedRun, position: Position) -> str | None:
    """The run that made the steps so far, which a fork's parent did; None where a run is new."""
    if position.last is not None and position.head == opened.start and opened.origin is not None:
        return opened.origin.run
    return opened.name if opened.resumed else None


def close(run: Run, error: BaseException | None) -> None:
    """End engines, workers and the hold on the run; whatever fails, the rest is ended too.

    It may be done again.
    """
    if run.closed:
        return
    run.closed = True
    run.stopped = run.cancelled.is_set() and not run.gate.given_up
    with contextlib.ExitStack() as stack:
        stack.callback(run.lease.release)
        stack.callback(run.tell, RunClosed(error=error, stopped=run.stopped))
        stack.callback(run.listeners.stop)
        stack.callback(run.engines.close)
        stack.callback(run.shards.close)
        stack.callback(run.episodes.close)
        stack.callback(run.cancelled.set)
        run.tell(RunClosing())


@contextlib.contextmanager
def begun_anew(run: Run) -> Iterator[Run]:
    """The run as it goes on from its last commit, for a body; `run`, which failed, is ended before.

    It was started outside its flow, which Prefect now tries again.
    """
    close(run, None)
    opened = open_run(run.flow, run.config, resume=run.name)
    again: Run | None = None
    try:
        with started(opened, run.reporting) as again:
            yield again
    finally:
        run.stopped = again is not None and again.stopped


@contextlib.contextmanager
def shown(run: Run) -> Iterator[None]:
    """During the body the run is seen on the dashboard, and a cancel there ends it."""
    name_after(run.name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_client())
        stack.enter_context(dashboard_ends(run.cancelled, flow_run_id(), run.cancelled_there))
        stack.callback(lambda: run.tell(RunEnded(step=run.head)))
        run.tell(
            RunBegan(
                steps=run.config.steps,
                head=run.head,
                fresh=run.cursor.fresh,
                last=run.last,
                at_work=run.engines.at_work,
                look=run.engines.look,
                machines=run.engines.machines,
            )
        )
        try:
            yield
        except BaseException:
            run.tell(RunStopped(step=run.head))
            raise


def finish(run: Run, data_over: bool) -> RunSummary:
    """Leave the curves, and put the end on record.

    The last thing that a run does: from now on it is done. `data_over`: it made fewer steps than it
    was asked for, because the data's epochs are over.
    """
    last_pages(run)
    now = open_source(run.config.data.source).as_recorded(run.source.digest)
    if now.digest == run.source.digest:  # for runs that go on: which rows the data had
        write_rows(run.files, row_digests(run))
    cost = cost_at_end(run)
    run.tell(RunFinished(step=run.head, cost=cost))
    over = DataOver.of(run.config.data) if data_over else None
    write_end(run.files, End(step=run.head, data_over=over, cost={**cost}))
    workers_ended(run.files)
    return RunSummary(
        run=run.name,
        steps=run.head,
        asked=run.config.steps,
        checkpoint=run.last_weights,
        dashboard=flow_run_url() or "",
        tracking=run.tracking.link,
        plot=run.store.url(curves_key(run.name)),
    )


def last_pages(run: Run) -> None:
    """Finish what people see of a run that makes no further step."""
    run.listeners.drain()
    clear(run.files, run.head)
    tidy(run.config, run.files, run.head)
    steps = run.history.steps()
    if steps:
        run.tell(
            StepsEnded(
                history=steps,
                curves=draw_curves(run.files, steps),
                timeline=draw_timeline(run.files),
            )
        )


def row_digests(run: Run) -> np.ndarray:
    """Of each row of the data, uint64 [rows]; of many rows the workers of the pool `cpu` make them.

    Where no worker can, this process does: the run's steps are all made by now.
    """
    source = run.source
    starts = range(0, len(source), ROWS_AT_ONCE)
    if len(starts) == 1:
        return source.row_digests()

    def made(start: int) -> np.ndarray:
        rows = range(start, min(start + ROWS_AT_ONCE, len(source)))
        call = run.call_id(run.after, f"row-digests-{start}")
        try:
            digests = engines.call(Scorer.row_digests, call, start=start, stop=rows.stop)
        except (ClusterLost, InfrastructureError):
            digests = source.row_digests(rows)
        return digests

    engines = run.engines[SCORER]
    try:
        workers = len(engines.live())
    except (ClusterLost, InfrastructureError):  # closed while the promotion waited for a person
        return source.row_digests()
    with ThreadPoolExecutor(max(1, workers)) as threads:
        return np.concatenate(list(threads.map(made, starts)))


LOOK_EVERY = 5.0  # seconds between looks at whether there is still something to close
ASK_EVERY = 2.0  # seconds between questions to the dashboard, of 2 ms each
PATIENCE = 4.0  # seconds in which the body must have ended after a signal
INTERRUPTED = 130  # exit codes: by a signal,
CANCELLED = 3  # by a person on the dashboard, so that nothing starts the run again
ENDING = (int(signal.SIGINT), int(signal.SIGTERM))


@contextlib.contextmanager
def signals_end(waits: threading.Event, last_words: Callable[[], object]) -> Iterator[None]:
    """During the body, SIGINT and SIGTERM set `waits` and end the run as they did before.

    Prefect's own handler, under a worker, says whether the run was cancelled; where there is none,
    KeyboardInterrupt is raised.

    The tasks' threads wait on workers, and Prefect waits for the tasks' threads before it lets an
    interrupt through, so the waits have to be ended first. A thread that cannot be woken (it sleeps
    before a retry, or the store hangs) is not waited for longer than PATIENCE: then, after
    `last_words`, the process ends as it would by SIGKILL, which loses nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    signalled, over, raised = threading.Event(), threading.Event(), threading.Event()

    def give_up() -> None:
        if not over.wait(PATIENCE):
            words = threading.Thread(target=last_words, daemon=True)  # who reads may hang too
            words.start()
            words.join(0.5)
            os._exit(INTERRUPTED)

    def begin() -> None:
        if not signalled.is_set():
            signalled.set()
            waits.set()
            threading.Thread(target=give_up, name="give-up", daemon=True).start()

    def stop(signum: int, frame: FrameType | None) -> None:
        if raised.is_set():
            return  # it is on its way out
        raised.set()
        begin()
        handler = before[signum]
        if callable(handler):
            handler(signum, frame)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in ENDING}
    for caught in ENDING:
        signal.signal(caught, stop)
    try:
        with _signals_noticed(begin):
            yield
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_noticed(begin: Callable[[], None]) -> Iterator[None]:
    """During the body, `begin` is called on SIGINT and SIGTERM, whoever handles them.

    Every flow and sub-flow of Prefect takes SIGTERM for itself and then waits for its tasks.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        while numbers := reader.recv(16):
            if any(number in ENDING for number in numbers):
                begin()

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()  # ends the watcher
        watcher.join()
        reader.close()


@contextlib.contextmanager
def set_closes(waits: threading.Event, close: Callable[[], object]) -> Iterator[None]:
    """During the body, `close` is called as soon as `waits` is set, whatever the body does."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if waits.wait(LOOK_EVERY):
                close()
                return

    threading.Thread(target=watch, name="closing", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class CancelledThere(Exception):
    """The body ended because a person cancelled the flow run on the dashboard."""


def or_cancelled(body: Callable[[], T]) -> T | State[None]:
    """What a flow's body returns; the state Cancelled where the dashboard ended it.

    The worker of a deployment says so otherwise, but may come too late to find a process, and a run
    on one's own machine has none: the flow run would stay in Cancelling, and keep its place in a
    limit.
    """
    try:
        return body()
    except CancelledThere as cancelled:
        return Cancelled(message=str(cancelled))


@contextlib.contextmanager
def dashboard_ends(
    waits: threading.Event, flow_run_id: UUID | None, cancelled: threading.Event | None = None
) -> Iterator[None]:
    """During the body, cancelling the flow run on the dashboard sets `cancelled` and `waits`.

    Raises CancelledThere in the place of the body's error, which is a wait that was ended.
    """
    if flow_run_id is None:
        yield
        return
    over = threading.Event()
    cancelled = cancelled or threading.Event()

    def watch() -> None:
        with get_client(sync_client=True) as client:
            while not over.wait(ASK_EVERY):
                with contextlib.suppress(PrefectException, httpx.HTTPError):
                    state = client.read_flow_run(flow_run_id).state
                    if state is not None and (state.is_cancelling() or state.is_cancelled()):
                        cancelled.set()
                        waits.set()
                        return

    # The server's address stands in a context variable, which a new thread does not inherit.
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(watch,), name="dashboard-cancel", daemon=True).start()
    try:
        yield
    except Exception as error:
        if cancelled.is_set():
            raise CancelledThere("Cancelled on the dashboard.") from error
        raise
    finally:
        over.set()


TIMELINE_STEPS = 12  # the last ones; more would only blur
TRAINERS = "train"  # in the timeline, for calls that all train workers carry out together


def curves_key(run: str) -> str:
    """Where a run's curves are."""
    return f"{run}/progress.png"


def draw_curves(files: RunStore, steps: History) -> bytes:
    """Keep the curves of a run's steps as a PNG, and return it."""
    numbers, metrics = zip(*steps, strict=True)
    image = progress_png(list(numbers), list(metrics), title=files.run)
    files.store.write(curves_key(files.run), image)
    return image


def draw_timeline(files: RunStore) -> bytes:
    """Keep a picture of which engine did what and when over the last steps, and return it.

    By the attempts that their commits keep.
    """
    calls = [
        TimelineCall(
            engine=str(attempt["worker"] or TRAINERS),
            stage=str(attempt["stage"]),
            step=commit.step,
            start=float(str(attempt["started"])),
            seconds=float(str(attempt["seconds"])),
        )
        for commit in itertools.islice(history(files), TIMELINE_STEPS)
        for attempt in commit.attempts
    ]
    image = timeline_png(calls, files.run)
    files.store.write(f"{files.run}/timeline.png", image)
    return image
