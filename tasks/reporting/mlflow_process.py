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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from operator import methodcaller
from threading import Event, Lock
from typing import Any

from configs.storage import TrackingConfig
from engines.processes.child_messages import Packed, by_name, packed, unpacked
from engines.processes.child_process import CallLost, ChildProcess, NotStarted, Program
from engines.processes.user_code import answer_calls, begin
from storage.tracking.connection import TrackingAddress, TrackingError
from storage.tracking.machine_samples import MachineSample
from storage.tracking.registry import RegisteredVersion
from storage.tracking.tracker import TracedSample, TrackedEvaluation, TrackedRun
from tasks.reporting.registered_files import Page

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

    Its methods are those of storage.tracking.tracker.Tracker of the same names. Each raises
    TrackingError when MLflow fails, or its process does, twice.
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
        self._call(START, tracked)

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        at: float,
        lineage: Mapping[str, str] | None = None,
    ) -> None:
        """As Tracker.log_step."""
        self._call("log_step", step, dict(metrics), at=at, lineage=lineage)

    def log_metrics(self, step: int, metrics: Mapping[str, float], *, at: float) -> None:
        """As Tracker.log_metrics."""
        self._call("log_metrics", step, dict(metrics), at=at)

    def log_evaluation(self, evaluated: TrackedEvaluation) -> None:
        """As Tracker.log_evaluation."""
        self._call("log_evaluation", evaluated)

    def log_traces(self, samples: Sequence[TracedSample]) -> None:
        """As Tracker.log_traces."""
        self._call("log_traces", samples)

    def log_machines(self, samples: Sequence[MachineSample]) -> None:
        """As Tracker.log_machines."""
        self._call("log_machines", samples)

    def log_file(self, name: str, content: bytes | str) -> None:
        """As Tracker.log_file."""
        self._call("log_file", name, content)

    def register_version(
        self,
        version: int,
        *,
        uri: str,
        digest: str,
        step: int,
        store_uri: str,
        lineage: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        at: float = 0.0,
        evaluations: Sequence[TrackedEvaluation] = (),
    ) -> str:
        """As Tracker.register_version."""
        given = {"uri": uri, "digest": digest, "step": step, "store_uri": store_uri}
        shown = {"lineage": lineage, "metrics": metrics, "at": at, "evaluations": evaluations}
        return str(self._call(REGISTER, version, **given, **shown))

    def registered(self) -> dict[int, str]:
        """As Tracker.registered."""
        found: dict[int, str] = self._call("registered")
        return found

    def registered_versions(self) -> list[RegisteredVersion]:
        """As Tracker.registered_versions."""
        found: list[RegisteredVersion] = self._call("registered_versions")
        return found

    def let_go(self, versions: Collection[int]) -> set[int]:
        """As Tracker.let_go."""
        found: set[int] = self._call("let_go", versions)
        return found

    def take_back(self, versions: Collection[int]) -> None:
        """As Tracker.take_back."""
        self._call("take_back", versions)

    def tag_removed(self, versions: Collection[int]) -> None:
        """As Tracker.tag_removed."""
        self._call("tag_removed", versions)

    def tag(self, name: str, value: str) -> None:
        """As Tracker.tag."""
        self._call("tag", name, value)

    def finish(self, status: str = "FINISHED") -> None:
        """As Tracker.finish."""
        self._call("finish", status)

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        with self._waits_told(method):
            return self._called(method, arguments, named)

    def _called(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        try:
            answer = self._asked(method, arguments, named)
        except CallLost:  # killed from outside, perhaps: one more try tells
            answer = PageAnswer(unknown=True)
        try:
            if answer.unknown:
                if method != START:
                    self._checked(self._asked(START, (self._tracked,), {}))
                answer = self._asked(method, arguments, named)
        except (CallLost, NotStarted) as error:
            raise TrackingError(
                f"MLflow at {self._config.uri} was not written to: {method} {error}"
            ) from None
        return self._checked(answer).value

    def _asked(
        self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> PageAnswer:
        asked = PageCall(
            page=self._page, config=self._config, method=method, arguments=arguments, named=named
        )
        return SHARED.process().call(asked, self._deadline(method))

    @contextlib.contextmanager
    def _waits_told(self, method: str) -> Iterator[None]:
        """During the body, if it lasts, a line every half minute says what is waited for."""
        over, began = Event(), time.time()

        def tell() -> None:
            left = TOLD_AFTER
            while not over.wait(left):
                self._tell(self._waiting(method, began))
                left = EVERY

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


def _answer(pages: dict[str, Page], asked: PageCall) -> PageAnswer:
    if asked.method != START and asked.page not in pages:
        return PageAnswer(unknown=True)
    try:
        tracker = pages.get(asked.page) or Page(asked.config)
        value = methodcaller(asked.method, *asked.arguments, **asked.named)(tracker)
        pages[asked.page] = tracker  # once it has started
    except TrackingError as error:
        return PageAnswer(error=str(error))
    except Exception:  # a fault of ours; the owner's log has it whole
        return PageAnswer(error=f"MLflow at {asked.config.uri} failed:\n{traceback.format_exc()}")
    return PageAnswer(
        value=value,
        link=tracker.link,
        last_step=tracker.last_step,
        model_name=tracker.model_name,
    )
