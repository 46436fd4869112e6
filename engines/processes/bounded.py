"""A bound on calls into libraries that cannot be trusted to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


class Overdue(TimeoutError):
    """The call has not ended in time; its thread is left to itself."""


def bounded(run: Callable[[], T], timeout: float, name: str) -> T:
    """The result of `run` in a daemon thread of that name; `timeout` in seconds.

    Raises what `run` raises, or Overdue.
    """
    outcome: Future[T] = Future()

    def attempt() -> None:
        try:
            outcome.set_result(run())
        except BaseException as error:  # raised in the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=attempt, name=name, daemon=True).start()
    if not wait([outcome], timeout).done:
        raise Overdue(f"no answer within {timeout:g} s")
    return outcome.result()
