"""A tracker besides MLflow in a process of its own, which is killed where it hangs.

None is imported in the flow's process. A process that is started anew goes on with the run where the
tracker has it, and the steps after that are written again.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from operator import methodcaller
from typing import Any

from engines.processes.child_process import CallLost, ChildProcess, NotStarted, Program
from engines.processes.user_code import (
    Broken,
    Packed,
    answer_calls,
    begin,
    by_name,
    packed,
    unpacked,
)
from storage.tracking.connection import TrackerUnusable, TrackingError
from storage.tracking.curve_trackers import (
    INIT_SECONDS,
    TRACKERS,
    CurvesOf,
    CurveTracker,
    first_line,
)

PROGRAM = Program(main="tasks.reporting.tracker_process:main")
IMPORT_SECONDS = 120.0  # deadlines: of the start of the process,
START_SECONDS = INIT_SECONDS + 30.0  # of the run's begin there,
LOG_SECONDS = 30.0  # of a step's metrics,
FINISH_SECONDS = 60.0  # and of its end, when all that waits is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerToLoad:
    """Which tracker: the first message."""

    kind: str  # of TRACKERS
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerReady:
    """Its package is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerCall:
    """A call of a method of it."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerAnswer:
    """What became of it."""

    error: str = ""
    unusable: bool = False
    unknown: bool = False  # this process has not begun the run
    link: str = ""
    last_step: int | None = None
    warnings: tuple[str, ...] = ()


_MESSAGES = by_name(Broken, TrackerReady, TrackerAnswer)


def _unpack(message: Packed) -> Any:
    return unpacked(message, _MESSAGES)


class TrackerProcess:
    """One run in a tracker. Its methods are those of CurveTracker; used by one thread."""

    def __init__(self, kind: str, folder: str, tell: Callable[[str], object]) -> None:
        """`kind`: of TRACKERS. `tell`: called with a sentence for people, each once."""
        self.name, self._tell = TRACKERS[kind].name, tell
        self._process: ChildProcess[TrackerReady, TrackerCall, TrackerAnswer] = ChildProcess(
            f"process that writes to {self.name}",
            PROGRAM,
            packed(TrackerToLoad(kind=kind, folder=folder)),
            _unpack,
            IMPORT_SECONDS,
        )
        self._run: CurvesOf | None = None
        self._known = TrackerAnswer()
        self._away = ""  # why the last call was not answered
        self._told: set[str] = set()

    @property
    def where(self) -> str:
        """As mlflow_page.Place.where."""
        return self.name

    @property
    def link(self) -> str:
        """As CurveTracker.link."""
        return self._known.link

    @property
    def last_step(self) -> int | None:
        """As CurveTracker.last_step."""
        return self._known.last_step

    def check_answers(self) -> None:
        """Raise TrackingError where the last call was not answered."""
        if self._away:
            raise TrackingError(self._away)

    def start(self, run: CurvesOf) -> None:
        """As CurveTracker.start."""
        self._run = run
        self._call("start", START_SECONDS, run)

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> bool:
        """As CurveTracker.log; False where the run was begun anew instead: see `last_step`."""
        if not self._call("log", LOG_SECONDS, step, dict(metrics), at):
            return False
        self._known = replace(self._known, last_step=step)  # of one that is left out too
        return True

    def log_evaluation(self, version: int, metrics: Mapping[str, float], at: float) -> bool:
        """As CurveTracker.log_evaluation; False as of `log`."""
        return self._call("log_evaluation", LOG_SECONDS, version, dict(metrics), at)

    def finish(self, status: str) -> bool:
        """As CurveTracker.finish; False as of `log`."""
        return self._call("finish", FINISH_SECONDS, status)

    def close(self) -> None:
        """End the process, in the middle of a call too."""
        self._process.close()

    def _call(self, method: str, seconds: float, *arguments: Any) -> bool:
        call = TrackerCall(method=method, arguments=arguments)
        try:
            answer = self._process.call(call, seconds)
        except CallLost as lost:
            self._away = f"{self.name} was not written to: {method} {first_line(lost)}"
            raise TrackingError(self._away) from None
        except (NotStarted, ValueError) as error:
            raise TrackerUnusable(f"{self.name} cannot be used: {first_line(error)}") from None
        for text in answer.warnings:
            self._tell_once(f"{self.name}: {text}")
        if answer.unknown:
            assert self._run is not None, "start() comes first"
            self.start(self._run)
            return False
        if answer.unusable:
            raise TrackerUnusable(answer.error)
        if answer.error and method == "start":
            self._away = answer.error
            raise TrackingError(self._away)
        self._away = ""
        if answer.error:
            self._tell_once(f"{answer.error} What it does not take is left out; the run goes on.")
        self._known = answer
        return True

    def _tell_once(self, text: str) -> None:
        kind = re.sub(r"\d+", "", text)  # another step of the same
        if kind not in self._told:
            self._told.add(kind)
            self._tell(text)


def main(socket: int, owner: int, dump: int) -> None:
    """Answer calls until the owner is gone. Arguments: engines.processes.user_code.begin."""
    begin(owner, dump, "refrain tracker")
    _be_silent()
    texts: list[str] = []

    def note(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if category is UserWarning:  # how Trackio tells what it does not take
            texts.append(str(message))

    warnings.showwarning = note
    with Connection(socket) as connection:
        _, fields = connection.recv()
        first = TrackerToLoad(**fields)
        try:
            tracker = TRACKERS[first.kind](first.folder)
        except Exception as error:
            connection.send(packed(Broken(error=f"{type(error).__name__}: {first_line(error)}")))
            return
        connection.send(packed(TrackerReady()))
        begun = False

        def answer(message: Packed) -> Packed:
            nonlocal begun
            call = TrackerCall(**message[1])
            answered = _answer(tracker, call, begun)
            begun = begun or (call.method == "start" and not answered.error)
            warning_texts = tuple(texts)
            texts.clear()
            return packed(replace(answered, warnings=warning_texts))

        answer_calls(connection, answer)


def _answer(tracker: CurveTracker, call: TrackerCall, begun: bool) -> TrackerAnswer:
    if call.method != "start" and not begun:
        return TrackerAnswer(unknown=True)
    try:
        methodcaller(call.method, *call.arguments)(tracker)
    except Exception as error:  # whatever a tracker raises, the run goes on
        text = (
            f"{tracker.name} failed at {call.method}: {type(error).__name__}: {first_line(error)}"
        )
        if isinstance(error, TrackingError):
            text = str(error)
        unusable = isinstance(error, TrackerUnusable)
        return replace(_known(tracker), error=text, unusable=unusable)
    return _known(tracker)


def _known(tracker: CurveTracker) -> TrackerAnswer:
    return TrackerAnswer(link=tracker.link, last_step=tracker.last_step)


def _be_silent() -> None:
    """Let nothing that a tracker prints come among the run's lines."""
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
