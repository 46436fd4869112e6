"""Calls on their way to the scheduler: those that begin at the same moment go in one message.

Of many tasks the scheduler takes one graph with less work than a graph for each of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import dask
from distributed import Client, Future
from distributed.client import ClosedClientError

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop

GATHER = 0.02  # seconds between messages, in which calls gather; one that comes alone goes at once
MOST = 64  # calls in a message


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
    """Sends tasks by a client, from its event loop. Safe to use from several threads."""

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
                for first in range(0, len(alike), MOST):
                    self._send_together(alike[first : first + MOST])
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
