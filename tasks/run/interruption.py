"""Ctrl-C, SIGTERM and a cancel from the dashboard: each ends every wait of the run at once."""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException

LOOK_EVERY = 5.0  # seconds between looks at whether there is still something to close
ASK_EVERY = 5.0  # seconds between questions to the dashboard, of 2 ms each
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

    asked, over, raised = threading.Event(), threading.Event(), threading.Event()

    def give_up() -> None:
        if not over.wait(PATIENCE):
            words = threading.Thread(target=last_words, daemon=True)  # who reads may hang too
            words.start()
            words.join(0.5)
            os._exit(INTERRUPTED)

    def begin() -> None:
        if not asked.is_set():
            asked.set()
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


@contextlib.contextmanager
def dashboard_ends(
    waits: threading.Event, flow_run_id: UUID | None, cancelled: threading.Event | None = None
) -> Iterator[None]:
    """During the body, cancelling the flow run on the dashboard sets `cancelled` and `waits`."""
    if flow_run_id is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        with get_client(sync_client=True) as client:
            while not over.wait(ASK_EVERY):
                with contextlib.suppress(PrefectException, httpx.HTTPError):
                    state = client.read_flow_run(flow_run_id).state
                    if state is not None and (state.is_cancelling() or state.is_cancelled()):
                        if cancelled is not None:
                            cancelled.set()
                        waits.set()
                        return

    # The server's address stands in a context variable, which a new thread does not inherit.
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(watch,), name="dashboard-cancel", daemon=True).start()
    try:
        yield
    finally:
        over.set()
