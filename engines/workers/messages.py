"""What travels between the flow process and an engine host, apart from errors. All frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engines.failures import Failure
from engines.workers.placement import NodeResources
from engines.workers.spent import Spent
from storage.objects.usage import Usage

R = TypeVar("R", covariant=True)  # what a call returns


@dataclass(frozen=True, kw_only=True, slots=True)
class CallId:
    """By what right a call is made, and which call it is.

    A host refuses a call of an older epoch of the run, or of another incarnation of the worker. A
    call that has finished under the same (run, epoch, step, call) is not run again: its recorded
    result is returned. Replayed work must therefore have another `call` name than the work it
    repeats.
    """

    run: str  # name of the run
    epoch: int  # fencing token of the run's lease; grows when another flow takes over
    step: int  # RL step
    call: str  # the call within the step, e.g. "rollout/3"; unique in (run, epoch, step)
    incarnation: str | None = None  # of the worker, from its BuildReport; none: any

    def at(self, incarnation: str) -> CallId:
        """This call for one incarnation of a worker."""
        return dataclasses.replace(self, incarnation=incarnation)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport:
    """An engine stands ready on a worker."""

    incarnation: str  # of the worker process; goes into call ids
    fresh: bool  # False: it had been built already


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What an engine gave back of its device's memory, or took again."""

    nbytes: int = 0
    seconds: float = 0.0
    digest: str = ""  # of the policy version that a rollout engine holds then; empty: of none

    @classmethod
    def together(cls, parts: Iterable[Moved]) -> Moved:
        """Of engines that moved at the same time: bytes of all, seconds of the slowest."""
        all_of = list(parts)
        return cls(
            nbytes=sum(part.nbytes for part in all_of),
            seconds=max((part.seconds for part in all_of), default=0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CallResult(Generic[R]):
    """How a call on a worker ended."""

    value: R | None = None  # what the engine method returned
    failure: Failure | None = None  # or what it raised
    process: str = ""  # HOST:PID of the worker
    usage: Usage = field(
        default_factory=Usage
    )  # what that process has asked of the store since it began
    spent: Spent = field(default_factory=Spent)  # what it has used of processors and GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """One engine of a worker."""

    cls: str  # import path
    digest: str  # of its spec
    version: int | None  # policy version held


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningCall:
    """A call that a worker is running."""

    role: str
    method: str
    token: str  # of the submission that started it
    call: str  # name from the call_id, or ""
    age: float  # seconds
    idle: float = 0.0  # seconds since it last reported that it got on, or began
    phase: str = ""  # what it reported last


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStatus:
    """What a worker holds and does."""

    worker: str  # name
    address: str
    incarnation: str
    pid: int
    engines: dict[str, EngineStatus]  # by role
    running: tuple[RunningCall, ...]
    traffic: Usage  # with the store


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """What a worker that somebody else started is like."""

    node: NodeResources  # its machine, and the GPUs that it may use
    nanny: bool  # whether it is started again when it dies
    daemonic: bool  # whether it may not start processes
