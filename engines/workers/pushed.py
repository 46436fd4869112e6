"""Results of calls, pushed by the worker to the flow, where they are small.

Dask's client fetches the result of each finished task: a request to the scheduler, which makes one to
the worker. What an engine returns are references and counts, of a few kilobytes. So the worker sends
them along the way on which it reports that the task has ended, just before that; of the task itself
nothing is left to fetch.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from distributed import Client, Scheduler, Worker

R = TypeVar("R")
MOST = 64 * 1024  # bytes; a larger result is fetched, so that no message holds up the others


def push(worker: Worker, topic: str, token: str, result: R) -> R | None:
    """On a worker: send the result on its way; what the task then returns, None if it was sent.

    Of a larger one is sent that it is there.
    """
    packed = pickle.dumps(result)
    small = len(packed) <= MOST
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
