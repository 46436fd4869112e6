"""What is to be written to a tracker, in order, by a thread of its own: no step of a run waits.

A write that fails is tried again. While the server does not answer all waits, and people are told
once; a write that a server which answers refuses is left out, and that is told too. A tracker that
cannot be used at all is told, and nothing more is written to it. Whatever is written is the tracker's
only once however often it is tried (storage/tracking/tracker.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from storage.objects.errors import StoreUnavailable
from storage.tracking.connection import TrackerUnusable, TrackingError

logger = logging.getLogger(__name__)

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
            left = len(self._writes)
            self._writes.clear()
        self._closing.set()
        if left:
            self._tell(
                f"{self._place.where} has not heard of all ({left} writes are left): "
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
