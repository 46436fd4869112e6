"""Whose call a teacher of several runs carries out next: a fair queue with a quota of tokens.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each call begins in virtual time when the one
before it of its run ends, or now, and lasts as long as it has tokens; the earliest one is next. So
runs with calls waiting get the same number of tokens each, whatever the size of their calls and
however many wait, and a run that comes late is not behind those that came before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MINUTE = 60.0  # seconds
Call = TypeVar("Call")


@dataclass(slots=True, kw_only=True)
class _Lane(Generic[Call]):
    """The calls of one run that wait."""

    left: float  # of the quota, in tokens; below 0 where the last call took more
    at: float  # when that was so, by the clock
    calls: deque[tuple[float, int, Call]] = field(default_factory=deque)  # start, tokens, call
    end: float = 0.0  # of the run's last call, in virtual time


class FairQueue(Generic[Call]):
    """Calls of several runs; not safe to use from several threads at once.

    Of two runs, one with calls of 10 tokens and one with calls of 30, three of the first and one of
    the second are taken in turn.
    """

    def __init__(
        self, tokens_per_minute: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`tokens_per_minute`: quota of each run. It may have a minute's at once, after a pause."""
        self._quota = tokens_per_minute
        self._clock = clock
        self._lanes: dict[str, _Lane[Call]] = {}
        self._now = 0.0  # virtual time: the start of the call taken last

    def put(self, run: str, tokens: int, call: Call) -> None:
        """Have a call wait behind those of its run."""
        lane = self._lane(run)
        start = max(self._now, lane.end)
        lane.end = start + tokens
        lane.calls.append((start, tokens, call))

    def take(self) -> Call | None:
        """The next call, which is no longer in the queue; None where none may begin now.

        A call begins when its run has any of its quota left, even if it takes more: what it took too
        much the run's next ones wait for.
        """
        ready = [lane for lane in self._lanes.values() if lane.calls and self._left(lane) > 0]
        if not ready:
            return None
        lane = min(ready, key=lambda lane: lane.calls[0][0])
        start, tokens, call = lane.calls.popleft()
        self._now = max(self._now, start)
        lane.left -= tokens
        return call

    def pause(self) -> float | None:
        """Seconds until a call may begin by the quota; None where no call waits."""
        waiting = [lane for lane in self._lanes.values() if lane.calls]
        if not waiting:
            return None
        if self._quota is None:
            return 0.0
        return max(0.0, min(-self._left(lane) for lane in waiting) * MINUTE / self._quota)

    def drop(self, run: str) -> list[Call]:
        """Forget a run; its calls that waited."""
        lane = self._lanes.pop(run, None)
        return [] if lane is None else [call for *_, call in lane.calls]

    def waiting(self, run: str) -> tuple[int, int]:
        """Calls of a run that wait, and their tokens."""
        lane = self._lanes.get(run)
        calls = [] if lane is None else lane.calls
        return len(calls), sum(tokens for _, tokens, _ in calls)

    def _lane(self, run: str) -> _Lane[Call]:
        if run not in self._lanes:
            self._lanes[run] = _Lane(left=float(self._quota or 0), at=self._clock())
        return self._lanes[run]

    def _left(self, lane: _Lane[Call]) -> float:
        """Tokens of the quota that a run has left, at most a minute's."""
        if self._quota is None:
            return 1.0
        now = self._clock()
        earned = (now - lane.at) * self._quota / MINUTE
        lane.left, lane.at = min(lane.left + earned, float(self._quota)), now
        return lane.left
