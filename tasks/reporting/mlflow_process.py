"""Runs' pages in MLflow, written by a process of their own, so that the flow's has none of the work.

MLflow takes more than a second of a processor to import and, with SQLite, 30 ms for the metrics of a
step, all of it Python: in the flow's process it would hold up the threads that drive the shards. All
runs of a process share one, which is started when the first page begins and dies with its owner.

It may be killed, or end a call by its deadline, and nothing is lost: a new one goes on with the page,
and the call is made again; what is recorded twice MLflow keeps once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from operator import methodcaller
from threading import Event, Lock
from typing import Any, Concatenate, ParamSpec, TypeVar

from configs.storage import TrackingConfig
from engines.processes.child_process import CallLost, ChildProcess, NotStarted, Program
from engines.processes.user_code import Packed, answer_calls, begin, by_name, packed, unpacked
from storage.tracking.connection import TrackingAddress, TrackingError
from storage.tracking.tracker import TrackedRun, Tracker
from tasks.reporting.registered_files import Page

P = ParamSpec("P")
R = TypeVar("R")

PROGRAM = Program(main="tasks.reporting.mlflow_process:main")
TOLD_AFTER = 15.0  # seconds of a call, after which people are told what is waited for
EVERY = 30.0  # seconds between further lines
DEADLINE = 600.0  # seconds of a call; MLflow itself tries a server for minutes
COPY_DEADLINE = 6 * 3600.0  # of one that copies a version to MLflow (tracking.copy_models)
START, REGISTER = "start", "register_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesReady:
    """The process listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCall:
    """A call of a method of a page's Tracker."""

    page: str
    config: TrackingConfig
    method: str
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnswer:
    """What it returned, or why it did not; and, of a page that has started, what is known of it."""

    value: Any = None
    error: str = ""
    unknown: bool = False  # this process has not started the page: it came after another one
    link: str = ""
    last_step: int | None = None
    model_name: str = ""


_MESSAGES = by_name(PagesReady, PageCall, PageAnswer)


def _unpack(message: Packed) -> Any:
    return unpacked(message, _MESSAGES)


class _Shared:
    """The process that all pages share."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._settings: dict[str, str] = {}
        self._process: ChildProcess[PagesReady, PageCall, PageAnswer] | None = None

    def process(self) -> ChildProcess[PagesReady, PageCall, PageAnswer]:
        """One that has the environment variables of MLflow's as they are now."""
        settings = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
        with self._lock:
            if self._process is not None and self._settings != settings:
                self._process.stop()
            if self._process is None:
                self._process = ChildProcess(
                    "process that writes to MLflow", PROGRAM, None, _unpack
                )
            self._settings = settings
            return self._process

    def stop(self) -> None:
        """End it; the next call starts another."""
        with self._lock:
            if self._process is not None:
                self._process.stop()


SHARED = _Shared()


class PageWriter:
    """One run's page, through that process. Safe to use from several threads once it has started.

    A call raises TrackingError when MLflow fails, or its process does, twice.
    """

    def __init__(self, config: TrackingConfig, tell: Callable[[str], None] = print) -> None:
        """ValueError when the address is none that MLflow can use. Starts nothing.

        tell: called in another thread with a sentence for people where MLflow is waited for.
        """
        self._tell = tell
        # The process may stand in another folder by then.
        self._config = config.model_copy(update={"uri": TrackingAddress.of(config.uri).uri})
        self._page = uuid.uuid4().hex
        self._tracked: TrackedRun | None = None
        self._known = PageAnswer()

    @property
    def link(self) -> str:
        """As Tracker.link."""
        return self._known.link

    @property
    def last_step(self) -> int | None:
        """As Tracker.last_step, when the page was last asked for anything."""
        return self._known.last_step

    @property
    def model_name(self) -> str:
        """As Tracker.model_name."""
        return self._known.model_name

    def start(self, tracked: TrackedRun) -> None:
        """As Tracker.start."""
        self._tracked = tracked
        self.call(Tracker.start, tracked)

    def call(
        self,
        method: Callable[Concatenate[Tracker, P], R],
        /,
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> R:
        """What a method of Tracker does to the page, such as Tracker.log_step."""
        with self._waits_told(method.__name__):
            answer: R = self._called(method.__name__, arguments, keywords)
            return answer

    def _called(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        try:
            answer = self._asked(method, arguments, keywords)
        except CallLost:  # killed from outside, perhaps: one more try tells
            answer = PageAnswer(unknown=True)
        try:
            if answer.unknown:
                if method != START:
                    self._checked(self._asked(START, (self._tracked,), {}))
                answer = self._asked(method, arguments, keywords)
        except (CallLost, NotStarted) as error:
            raise TrackingError(
                f"MLflow at {self._config.uri} was not written to: {method} {error}"
            ) from None
        return self._checked(answer).value

    def _asked(
        self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> PageAnswer:
        call = PageCall(
            page=self._page, config=self._config, method=method, arguments=arguments, named=keywords
        )
        return SHARED.process().call(call, self._deadline(method))

    @contextlib.contextmanager
    def _waits_told(self, method: str) -> Iterator[None]:
        """During the body, if it lasts, a line every half minute says what is waited for."""
        over, began = Event(), time.time()

        def tell() -> None:
            pause = TOLD_AFTER
            while not over.wait(pause):
                self._tell(self._waiting(method, began))
                pause = EVERY

        threading.Thread(target=tell, name="mlflow-waits", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _waiting(self, method: str, began: float) -> str:
        most = 2 * self._deadline(method)  # a call that ended by its deadline is made once more
        since, until = (time.strftime("%H:%M:%S", time.localtime(began + s)) for s in (0, most))
        return (
            f"MLflow at {self._config.uri} has not answered since {since} ({method}). It is waited "
            f"for until {until}."
        )

    def _deadline(self, method: str) -> float:
        copies = method == REGISTER and self._config.copy_models
        return COPY_DEADLINE if copies else DEADLINE

    def _checked(self, answer: PageAnswer) -> PageAnswer:
        if answer.error:
            raise TrackingError(answer.error)
        self._known = answer
        return answer


def main(socket: int, owner: int, dump: int) -> None:
    """Answer calls until the owner is gone. Arguments: engines.processes.user_code.begin."""
    begin(owner, dump)
    pages: dict[str, Page] = {}
    with Connection(socket) as connection:
        connection.recv()
        connection.send(packed(PagesReady()))
        answer_calls(connection, lambda message: packed(_answer(pages, _unpack(message))))


def _answer(pages: dict[str, Page], call: PageCall) -> PageAnswer:
    if call.method != START and call.page not in pages:
        return PageAnswer(unknown=True)
    try:
        tracker = pages.get(call.page) or Page(call.config)
        value = methodcaller(call.method, *call.arguments, **call.named)(tracker)
        pages[call.page] = tracker  # once it has started
    except TrackingError as error:
        return PageAnswer(error=str(error))
    except Exception:  # a fault of ours; the owner's log has it whole
        return PageAnswer(error=f"MLflow at {call.config.uri} failed:\n{traceback.format_exc()}")
    return PageAnswer(
        value=value,
        link=tracker.link,
        last_step=tracker.last_step,
        model_name=tracker.model_name,
    )
