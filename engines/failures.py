"""What can go wrong between the flow process and a worker, and how an error travels back.

`InfrastructureError` is the base of what Prefect may retry; everything else is final. An engine's
own exception comes back as itself, unless its class lives in a module that the flow process has not
loaded (torch, vLLM): unpickling it would import that library, so the nearest base class that the
flow process does know carries the text instead.
"""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from dataclasses import dataclass
from typing import Any


class InfrastructureError(RuntimeError):
    """A failure of the machinery, not of the work: the same call may succeed when tried again."""


class WorkerLost(InfrastructureError):
    """The worker process died while a call ran or waited on it."""

    def __init__(self, worker: str, cause: str) -> None:
        super().__init__(f"worker {worker} was lost: {cause}")
        self.worker = worker
        self.cause = cause

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.worker, self.cause)


class CallDeadline(InfrastructureError):
    """A call ran longer than its deadline; its worker has been killed and comes back anew."""

    def __init__(self, worker: str, seconds: float, call: str = "a call") -> None:
        super().__init__(
            f"{call} on worker {worker} did not end within {seconds:g} s; the worker is restarted"
        )
        self.worker = worker
        self.seconds = seconds
        self.call = call

    def __reduce__(self) -> tuple[type, tuple[str, float, str]]:
        return type(self), (self.worker, self.seconds, self.call)


class NoProgress(CallDeadline):
    """An engine that starts has not got on for too long; its worker has been killed."""

    def __init__(self, worker: str, seconds: float, call: str, phase: str) -> None:
        InfrastructureError.__init__(
            self,
            f"{call} on worker {worker} made no progress for {seconds:g} s, in the phase "
            f"{phase or 'before the first'!r}; the worker is restarted. Set cluster.start_timeout "
            "higher if this phase takes longer.",
        )
        self.worker = worker
        self.seconds = seconds
        self.call = call
        self.phase = phase

    def __reduce__(self) -> tuple[type, tuple[str, float, str, str]]:  # type: ignore[override]
        return type(self), (self.worker, self.seconds, self.call, self.phase)


class NoWorkers(InfrastructureError):
    """A pool did not have enough live workers in time."""

    def __init__(self, pool: str, waited: float, found: int = 0, needed: int = 1) -> None:
        super().__init__(
            f"pool {pool!r} has {found} of {needed} live workers after {waited:.0f} s. "
            "Look at what they printed (refrain logs RUN --workers) or raise "
            "cluster.no_workers_timeout; the run can be resumed."
        )
        self.pool = pool
        self.waited = waited
        self.found = found
        self.needed = needed

    def __reduce__(self) -> tuple[type, tuple[str, float, int, int]]:
        return type(self), (self.pool, self.waited, self.found, self.needed)


class EngineMissing(InfrastructureError):
    """The worker holds no engine for the role: it was restarted, or `build` was not called."""


class StaleCall(RuntimeError):
    """A call is older than what the worker has seen: another flow took over the run."""


class StaleIncarnation(StaleCall, InfrastructureError):
    """The call was meant for a worker that has been restarted since: build, then call again."""


class ClusterLost(RuntimeError):
    """The Dask scheduler is gone, and with it every worker. The run can be resumed."""


class CallCancelled(RuntimeError):
    """The caller's cancel event was set while the call ran."""


class OutOfMemory(RuntimeError):
    """An engine ran out of memory: its settings ask for more than the machine has. Never retried.

    The message is one sentence: which call, which memory, what holds most of it, what to set.
    """


class GangFailed(RuntimeError):
    """A gang was torn down because one rank failed in a way that will fail again."""

    def __init__(self, rank: int, worker: str, cause: str) -> None:
        super().__init__(
            f"rank {rank} (worker {worker}) failed and its gang was torn down: {cause}"
        )
        self.rank = rank
        self.worker = worker
        self.cause = cause

    def __reduce__(self) -> tuple[type, tuple[int, str, str]]:
        return type(self), (self.rank, self.worker, self.cause)


class GangLost(GangFailed, InfrastructureError):
    """A gang was torn down because a rank died, hung or lost its peers: form it and try again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An engine's exception on its way to the flow process."""

    lineage: tuple[tuple[str, str], ...]  # (module, class name) of the class and of its bases
    message: str  # str() of the exception
    text: str  # the worker's traceback
    pickled: bytes | None  # what __reduce__ returned, where that can be pickled


class _LoadedOnly(pickle.Unpickler):
    """Unpickles only what needs no import."""

    def find_class(self, module: str, name: str) -> object:
        if module not in sys.modules:
            raise pickle.UnpicklingError(f"{module} is not loaded")
        return super().find_class(module, name)


def capture(error: BaseException) -> Failure:
    """Record an exception so that any process can read it."""
    pickled = None
    try:
        # Not the exception: libraries register ways to pickle one with its causes and traceback.
        pickled = pickle.dumps(error.__reduce__())
        _rebuild(pickle.loads(pickled))
    except Exception:  # any class's own __reduce__ runs here; then only the text travels
        pickled = None
    return Failure(
        lineage=tuple(
            (base.__module__, base.__qualname__)
            for base in type(error).__mro__
            if issubclass(base, BaseException)
        ),
        message=str(error),
        text="".join(traceback.format_exception(error)),
        pickled=pickled,
    )


def _rebuild(reduced: tuple[Any, ...]) -> BaseException:
    """The exception that __reduce__ described."""
    make, args, *state = reduced
    error = make(*args)
    if not isinstance(error, BaseException):
        raise pickle.UnpicklingError(f"{make} made no exception")
    if state and state[0]:
        error.__setstate__(state[0])
    return error


def _stand_in(failure: Failure) -> BaseException:
    """An exception of the nearest base class that is loaded here and takes a message."""
    text = f"{failure.lineage[0][1]}: {failure.message}"
    for module, name in failure.lineage[1:]:
        base = vars(sys.modules[module]).get(name) if module in sys.modules else None
        if isinstance(base, type) and issubclass(base, BaseException):
            try:
                return base(text)
            except TypeError:  # it wants other arguments
                continue
    return Exception(text)


def revive(failure: Failure, where: str) -> BaseException:
    """The exception to raise for a failure, with a note that says where it came from."""
    error: BaseException | None = None
    if failure.pickled is not None:
        try:
            error = _rebuild(_LoadedOnly(io.BytesIO(failure.pickled)).load())
        except Exception:  # a class's own __reduce__ again: fall back to the text
            error = None
    if error is None:
        error = _stand_in(failure)
    error.add_note(f"raised {where}:\n{failure.text.rstrip()}")
    return error


class WeightMismatch(RuntimeError):
    """An engine does not hold the weights that it was given, or was offered others; names them."""
