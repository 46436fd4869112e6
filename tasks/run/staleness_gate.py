"""When a step may sample and when it may train, where several steps are under way.

With max_staleness = n up to n + 1 step flows run at once. Step k samples as soon as policy version
k - 1 - n is there and step k - 1 has drawn its prompts; it trains once step k - 1 is committed. So
the staleness of a sample, the version that trains (k - 1) less the version of its oldest token, time
in any queue included, is never above n; steps draw, train and are committed in order. With n = 0
nothing ever waits here. A feature may lower n between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from engines.failures import CallCancelled

SLICE = 0.5  # seconds between looks at whether the run is cancelled
BOUND = "staleness/bound"  # metric: max_staleness for steps that begin after the commit


class StepGivenUp(RuntimeError):
    """A step was not made, since one before it failed or was to be the last."""


class WaitTooLong(RuntimeError):
    """A step waited longer than its deadline for the step before it."""


class Gate:
    """The counters that steps wait for; made anew from the last commit when a run is resumed."""

    def __init__(self, head: int, max_staleness: int, deadline: float, reserve: int = 0) -> None:
        """Begin at a step's commit, `head`.

        deadline: seconds that a wait may take in which no step is committed. reserve: versions of
        max_staleness that are left for groups which are carried to later steps.
        """
        self.head = head  # the last committed step
        self.max_staleness = max_staleness  # of steps that begin from now on
        self.deadline = deadline
        self._reserve = reserve
        self.cancelled = threading.Event()
        self.given_up = False  # cancelled for a failure, not by a person
        self._last: tuple[int, str] | None = None  # step after which none is made, and why
        self._end: tuple[int, Exception] | None = None  # step after which the run ends so
        self._drawn = head  # the last step that has drawn its prompts
        self._moved = time.monotonic()  # when a step was last committed
        self._changed = threading.Condition()

    def wait_to_begin(self, step: int) -> None:
        """Return when a step may draw and sample. StepGivenUp, WaitTooLong, CallCancelled."""
        what = f"policy version {self._oldest(step)} to sample with"
        self._wait(step, lambda: self.head >= self._oldest(step), what)
        self._wait(step, lambda: self._drawn >= step - 1, f"step {step - 1} to draw its prompts")

    def _oldest(self, step: int) -> int:
        """The version with which a step may begin to sample."""
        return step - 1 - max(0, self.max_staleness - self._reserve)

    def wait_to_train(self, step: int) -> None:
        """Return when a step may train: the one before it is committed. Raises as above."""
        self._wait(step, lambda: self.head >= step - 1, f"step {step - 1} to be committed")

    def check_turn(self, step: int) -> None:
        """ValueError for a step that would train before its turn: its flow does not wait."""
        if self.head < step - 1:
            raise ValueError(
                f"Step {step} was to train before step {step - 1} is committed. With max_staleness "
                "> 0 the flow of a step calls run.gate.wait_to_train(step) before it asks for "
                "log-probs, values or advantages."
            )

    def drawn(self, step: int) -> None:
        """A step has drawn its prompts."""
        with self._changed:
            self._drawn = max(self._drawn, step)
            self._changed.notify_all()

    def committed(self, step: int) -> None:
        """A step is committed."""
        with self._changed:
            self.head, self._moved = step, time.monotonic()
            self._drawn = max(self._drawn, step)
            self._changed.notify_all()

    def lower(self, max_staleness: int) -> None:
        """Steps that have not begun sample within this bound; those under way go on."""
        with self._changed:
            self.max_staleness = min(self.max_staleness, max_staleness)

    def end_after(self, step: int, error: Exception) -> None:
        """The run ends after a step: those after it are given up, and check_end raises the error."""
        self._end = (step, error)
        self._none_after(step, f"the run ends after step {step}")

    def check_end(self, step: int) -> None:
        """Raise the error by which the run ends after a step, if it does."""
        if self._end is not None and self._end[0] == step:
            raise self._end[1]

    def give_up(self) -> None:
        """End every wait of the run, since a step has failed; unless a person has ended it."""
        self.given_up = not self.cancelled.is_set()
        self.cancelled.set()

    def fail(self, step: int) -> None:
        """A step will not be made: those after it are given up, those before it go on."""
        self._none_after(step, f"step {step} failed")

    def _none_after(self, step: int, why: str) -> None:
        with self._changed:
            if self._last is None or step < self._last[0]:
                self._last = (step, why)
            self._changed.notify_all()

    def _wait(self, step: int, ready: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        with self._changed:
            while True:
                if self._last is not None and self._last[0] < step:
                    raise StepGivenUp(f"Step {step} is given up, since {self._last[1]}.")
                if ready():
                    return
                if self.cancelled.is_set():
                    raise CallCancelled(f"Step {step} waited for {what} when the run was ended.")
                waited = time.monotonic() - max(began, self._moved)
                if waited > self.deadline:
                    raise WaitTooLong(
                        f"Step {step} waited {waited:.0f} s for {what}, and no step was committed "
                        "meanwhile. Look at the tasks of that step (refrain logs RUN), or set "
                        "rollout.deadline or train.deadline higher; the run can be resumed."
                    )
                self._changed.wait(SLICE)
