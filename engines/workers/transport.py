"""How calls get to the scheduler, how their results come back, and who looks whether they end.

Dask's client fetches the result of each finished task: a request to the scheduler, which makes one to
the worker. What an engine returns are references and counts, of a few kilobytes. So the worker pushes
them along the way on which it reports that the task has ended, just before that; of the task itself
nothing is left to fetch.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import dask
from distributed import Client, Future, Scheduler, Worker
from distributed.client import ClosedClientError

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop

GATHER = 0.02  # seconds between messages, in which calls gather; one that comes alone goes at once
CALLS_TOGETHER = 64  # calls in a message
R = TypeVar("R")
PUSHED_BYTES = 64 * 1024  # a larger result is fetched, so that no message holds up the others
SLICE = 0.5  # seconds between looks at a cancel event by those who wait for several calls
LOOK = 2.0  # seconds between looks; all calls wake at once when a worker leaves or the run ends


@dataclass(kw_only=True, slots=True)
class Outgoing:
    """A task for one worker; `future` or `error` is set once it has been sent, or could not be."""

    function: Callable[..., Any]
    args: Sequence[Any]
    key: str  # of the task
    address: str  # of the worker
    resources: Mapping[str, float]  # of the worker's, that it takes; empty: it takes none
    settled: Callable[[], object]  # called once it has been sent, or could not be
    future: Future | None = None
    error: Exception | None = None

    @property
    def kind(self) -> tuple[int, tuple[tuple[str, float], ...]]:
        """Equal for those that can go together."""
        return id(self.function), tuple(self.resources.items())


class Sender:
    """Sends tasks by a client, from its event loop. Safe to use from several threads.

    Those that begin at the same moment go in one message: of many tasks the scheduler takes one graph
    with less work than a graph for each of them.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: list[Outgoing] = []
        self._lock = threading.Lock()
        self._sent = 0.0  # when the last message went

    def send(self, call: Outgoing) -> None:
        """Send a task soon. ClosedClientError where nothing is sent any more."""
        if self._client.status in ("closing", "closed"):
            raise ClosedClientError(f"{self._client} has been closed")
        with self._lock:
            self._waiting.append(call)
            if len(self._waiting) > 1:
                return  # somebody has asked for it to be sent
            pause = self._sent + GATHER - time.monotonic()
        loop = cast("IOLoop", self._client.loop)
        if pause > 0:
            loop.add_callback(loop.call_later, pause, self._send)
        else:
            loop.add_callback(self._send)

    def drop(self, call: Outgoing) -> None:
        """Nobody wants a task any more: Dask cancels it if it has not begun, and frees its result."""
        with self._lock:
            if call.future is None:
                with contextlib.suppress(ValueError):  # it could not be sent
                    self._waiting.remove(call)
        if call.future is not None:
            call.future.release()

    def _send(self) -> None:
        with self._lock:
            calls = sorted(self._waiting, key=lambda call: call.kind)
            self._waiting.clear()
            self._sent = time.monotonic()
            for _, some in groupby(calls, key=lambda call: call.kind):
                alike = list(some)
                for first in range(0, len(alike), CALLS_TOGETHER):
                    self._send_together(alike[first : first + CALLS_TOGETHER])
        for call in calls:
            call.settled()

    def _send_together(self, calls: Sequence[Outgoing]) -> None:
        try:
            with dask.annotate(workers=_Workers({call.key: [call.address] for call in calls})):
                futures = self._client.map(
                    calls[0].function,
                    *zip(*(call.args for call in calls), strict=True),
                    key=[call.key for call in calls],
                    resources=dict(calls[0].resources) or None,
                    pure=False,
                    retries=0,
                )
        except Exception as error:
            if len(calls) == 1 or isinstance(error, ClosedClientError):
                for call in calls:
                    call.error = error
                return
            for call in calls:  # one that cannot be pickled must not keep back the others
                self._send_together([call])
            return
        for call, future in zip(calls, futures, strict=True):
            call.future = future


class _Workers:
    """For Dask, which asks by a task's key where it may run."""

    def __init__(self, of: Mapping[str, list[str]]) -> None:
        self._of = dict(of)

    def __call__(self, key: str) -> list[str]:
        return self._of[key]


def push(worker: Worker, topic: str, token: str, result: R) -> R | None:
    """On a worker: send the result on its way; what the task then returns, None if it was sent.

    Of a larger one is sent that it is there.
    """
    packed = pickle.dumps(result)
    small = len(packed) <= PUSHED_BYTES
    worker.log_event(topic, [token, packed if small else None])
    return None if small else result


class PushedResults:
    """In the flow: what workers have pushed and nobody has taken yet. Safe in several threads."""

    def __init__(self, client: Client) -> None:
        """Begin to listen, on a topic that no other client of the scheduler has."""
        self.topic = f"refrain-results-{client.id}"
        self._came: dict[str, bytes | None] = {}  # by token, of those that are expected
        self._wake: dict[str, Callable[[], object]] = {}
        self._lock = threading.Lock()
        client.subscribe_topic(self.topic, self._heard)

    def expect(self, token: str, wake: Callable[[], object]) -> None:
        """Keep the result of a call that is about to be sent, until it is taken or forgotten.

        `wake` is called once the call has ended, by the thread that listens.
        """
        with self._lock:
            self._came[token], self._wake[token] = None, wake

    def _heard(self, event: tuple[float, tuple[str, bytes | None]]) -> None:
        token, packed = event[1]
        with self._lock:
            if (wake := self._wake.pop(token, None)) is None:
                return
            self._came[token] = packed
        wake()

    def take(self, token: str) -> Any:
        """A call's result, once it has ended; None where it was not pushed."""
        with self._lock:
            packed = self._came.pop(token, None)
            self._wake.pop(token, None)
        return None if packed is None else pickle.loads(packed)

    def close(self, client: Client, timeout: float) -> None:
        """Leave nothing on a scheduler that goes on: it keeps a topic's last messages for ever."""
        client.sync(
            client.run_on_scheduler, _forget_topic, topic=self.topic, callback_timeout=timeout
        )

    def forget(self, token: str) -> None:
        """Nobody wants a call's result any more."""
        with self._lock:
            self._came.pop(token, None)
            self._wake.pop(token, None)


def _forget_topic(topic: str, dask_scheduler: Scheduler) -> None:
    dask_scheduler._broker.truncate(topic)


class Watched(Protocol):
    """A call that somebody waits for."""

    address: str
    attention: threading.Event  # the waiting thread looks for itself once this is set

    def overdue(self, now: float) -> bool:
        """Whether its deadline is over, or it has been cancelled."""

    def ended_unheard(self) -> bool:
        """Whether it has ended and nobody was told."""


class CallWatch:
    """One thread that looks, for all calls under way at once, whether something ends their wait.

    A thread waits for each call. Were each to look for itself, a thousand of them would take a tenth
    of a core for waking up.
    """

    def __init__(self, workers: Callable[[], Mapping[str, str]]) -> None:
        """`workers`: address -> pool of those that live; an error when the cluster is lost."""
        self._workers = workers
        self._calls: set[Watched] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._soon = threading.Event()

    @contextlib.contextmanager
    def over(self, call: Watched) -> Iterator[None]:
        """Watch over a call while the body waits for it."""
        with self._lock:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="calls", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)

    def look_now(self) -> None:
        """Look at once: something happened that may have ended a call."""
        self._soon.set()

    def close(self) -> None:
        """Wake everyone, and end."""
        self._closed.set()
        self._soon.set()
        self._wake_all()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._soon.wait(LOOK)
            self._soon.clear()
            try:
                workers = self._workers()
            except Exception:  # whoever waits meets it too, and says where
                self._wake_all()
                continue
            now = time.monotonic()
            with self._lock:
                calls = list(self._calls)
            for call in calls:
                if call.overdue(now) or call.address not in workers or call.ended_unheard():
                    call.attention.set()
        self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            for call in self._calls:
                call.attention.set()
