"""What the flow process may call on an engine, how it is called, and how an engine is specified.

A contract is an abstract class below Engine, in a module without torch. Its methods are what the flow
process calls; the engine's class derives from it, so that one that lacks a method cannot be made, and
a type checker compares what it takes and returns. A caller names a method by the contract's own
function: `pool.call(Scorer.score, …)`.

Running out of memory is a failure of its own, said in a sentence: a gang that is built again runs out
again at the same place, so no one retries it. torch's errors and vLLM's are known by the names of
their classes and by their words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

from prometheus_client import Metric
from pydantic import BaseModel, Field

from configs.base import Settings
from engines.failures import Failure, OutOfMemory
from engines.workers.placement import NodeResources
from engines.workers.worker_metrics import Spent
from storage.objects.store import Store
from storage.objects.usage import Usage

Memory = Literal["device", "host"]  # a GPU's own, or that of the machine
E = TypeVar("E", bound="Engine", covariant=True)  # the contract that an engine keeps
P = ParamSpec("P")  # what a method takes
R = TypeVar("R")  # what it returns
Result = TypeVar("Result", covariant=True)
GIB = 2**30
# A device's, in torch's words and in vLLM's (0.32), whose engine is another process: its error comes
# as text.
_DEVICE = (
    "CUDA out of memory",
    "HIP out of memory",
    "CUDA error: out of memory",
    "desired GPU memory utilization",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
)
_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


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
        nbytes, seconds = zip(
            (0, 0.0), *((part.nbytes, part.seconds) for part in parts), strict=True
        )
        return cls(nbytes=sum(nbytes), seconds=max(seconds))


@dataclass(frozen=True, kw_only=True, slots=True)
class CallResult(Generic[Result]):
    """How a call on a worker ended."""

    value: Result | None = None  # what the engine method returned
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceContext:
    """The span that a call is a part of, as it travels to a worker; see tracking.otlp_endpoint."""

    endpoint: str  # address of the collector, OTLP over HTTP
    parent: str  # the span, as W3C's header traceparent has it


_TRACE: ContextVar[TraceContext | None] = ContextVar("trace", default=None)


def set_trace(trace: TraceContext | None) -> TraceContext | None:
    """Have this thread's calls belong to a span, or to none; returns to which they did before."""
    before = _TRACE.get()
    _TRACE.set(trace)
    return before


@contextlib.contextmanager
def span_of(
    trace: TraceContext | None, name: str, attributes: Mapping[str, str | int]
) -> Iterator[None]:
    """The body is a span of a call's trace, if it has one and OpenTelemetry is installed here."""
    if trace is None:
        yield
        return
    try:
        from engines.workers.spans import call_span
    except ImportError:  # it is missing on this machine: the call matters, its span does not
        yield
        return
    with call_span(trace.endpoint, trace.parent, name, attributes):
        yield


class Engine(ABC):  # noqa: B024 - contracts below it have the abstract methods
    """Base of every engine and of every contract; a contract's methods say what they take and return.

    An engine's class is made with one argument, the payload of its EngineSpec.
    """

    version: int | None = None  # policy version of the weights held, if any; for status reports

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in vars(cls).items():
            if not (inspect.isfunction(member) and getattr(member, "__isabstractmethod__", False)):
                continue
            signature = inspect.signature(member)
            arguments = list(signature.parameters.values())[1:]
            bare = [each.name for each in arguments if each.annotation is inspect.Parameter.empty]
            if bare or signature.return_annotation is inspect.Signature.empty:
                missing = ", ".join(bare) or "the return value"
                raise TypeError(
                    f"{cls.__name__}.{name}: {missing} has no annotation. Annotate the method fully."
                )

    def close(self) -> None:  # noqa: B027 - an engine may hold nothing
        """Give devices, child processes and memory back."""

    def metrics(self) -> Sequence[Metric]:
        """What the engine's library measures of itself, for Prometheus; quick, from any thread."""
        return ()

    def memory_held(self, memory: Memory) -> Mapping[str, int]:
        """Bytes that the engine holds, by what; empty where it does not know."""
        return {}

    @classmethod
    def memory_setting(
        cls, payload: Any, memory: Memory, held: Mapping[str, int], said: str
    ) -> str:
        """What to set so that there is enough memory, as a sentence.

        `payload` is that of the EngineSpec, `held` what `memory_held` said, `said` the error's words.
        """
        return "Give its pool fewer workers on each machine, or machines with more memory."


class Ranked(Engine):
    """Base of contracts of engines whose ranks work together (engines/workers/gang.py).

    Every rank gets the same arguments. The result is rank 0's, save of methods that are `joined_by`.
    A worker makes such engines, and all calls on them, in one thread, one after the other.
    """

    @abstractmethod
    def join(
        self, rank: int, world: int, host: str, port: int, generation: int, timeout: float
    ) -> object:
        """Enter the process group of a generation, leaving an earlier one first; called by the gang.

        `host`:`port` is where rank 0 listens; `timeout` (seconds) bounds each phase, and an error
        names the phase that is stuck.
        """

    @abstractmethod
    def offload(self) -> Moved:
        """Put what is on the device into the host's memory, until `onload`.

        The device's memory is free then; every other call is an error.
        """

    @abstractmethod
    def onload(self) -> Moved:
        """Bring back what `offload` put away, the same to the bit."""


def memory_that_ran_out(error: BaseException) -> Memory | None:
    """Which memory an error says there is not enough of; None for any other error."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    if "torch.OutOfMemoryError" in names:
        return "device"
    if isinstance(error, MemoryError):
        return "host"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host"
    text = str(error)
    if any(words in text for words in _DEVICE):
        return "device"
    if any(words in text for words in _HOST):
        return "host"
    return None


def described(by_use: Mapping[str, int]) -> str:
    """Bytes by what holds them, the largest first: "activations and logits 61.2 GiB, …"."""
    ordered = sorted(by_use.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {size_of(size)}" for what, size in ordered if size > 0)


def size_of(size: float) -> str:
    """Bytes in GiB, below one of those in MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.0f} MiB"


@contextlib.contextmanager
def memory_watched(
    what: str, payload: object, engine: Callable[[], Engine | type[Engine]]
) -> Iterator[None]:
    """Errors of the body that are want of memory become OutOfMemory, with what the engine says.

    Args:
        what: The call or build, and its worker; the sentence begins with it.
        payload: From what the engine is built.
        engine: The engine, or its class where it is not built yet; asked while the body's tensors
            still stand, which the error's traceback holds.
    """
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:
        memory = memory_that_ran_out(error)
        if memory is None:
            raise
        source = engine()
        by_use = source.memory_held(memory) if isinstance(source, Engine) else {}
        uses = f", held by: {described(by_use)}" if any(by_use.values()) else ""
        advice = source.memory_setting(payload, memory, by_use, str(error))
        raise OutOfMemory(f"{what} ran out of {memory} memory{uses}. {advice}") from error


def joined_by(join: Callable[[Sequence[R]], R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Of a contract's method: `join` makes one result of those of all ranks, in their order."""

    def of(method: Callable[P, R]) -> Callable[P, R]:
        method.joined_by = join  # type: ignore[attr-defined]
        return method

    return of


def join_of(method: Callable[..., R]) -> Callable[[Sequence[R]], R]:
    """How the ranks' results of a method become one."""
    join: Callable[[Sequence[R]], R] = getattr(method, "joined_by", itemgetter(0))
    return join


def callable_methods(contract: type[Engine]) -> tuple[str, ...]:
    """Names of the methods that a contract has, which are those that can be called."""
    return tuple(
        dict.fromkeys(
            name
            for base in reversed(contract.__mro__)
            if issubclass(base, Engine) and base is not Engine
            for name, member in vars(base).items()
            if inspect.isfunction(member) and not (name.startswith("_") or hasattr(Engine, name))
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[Result]):
    """A call of an engine's method, as it is sent; the method goes by its name."""

    role: str  # of the engine on its worker
    method: str
    arguments: Mapping[str, object]  # by name
    id: CallId | None = None  # None: it may be made several times
    trace: TraceContext | None = None  # that it is a part of

    @classmethod
    def of(
        cls,
        role: str,
        method: Callable[Concatenate[Any, P], R],
        call_id: CallId | None,
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> Call[R]:
        """The call of a contract's method; its arguments are given by name."""
        assert not nothing, f"{method.__name__}: arguments are given by name"
        return Call(
            role=role,
            method=method.__name__,
            arguments=arguments,
            id=call_id,
            trace=_TRACE.get(),
        )

    def at(self, incarnation: str) -> Call[Result]:
        """This call for one incarnation of a worker."""
        call_id = self.id and dataclasses.replace(self.id, incarnation=incarnation)
        return dataclasses.replace(self, id=call_id)

    @property
    def label(self) -> str:
        """What people call it."""
        return f"{self.role}.{self.method}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec(Generic[E]):
    """An engine to build: its class by import path, its one argument, and the contract it keeps."""

    cls: str  # package.module:Class, imported on the worker only
    payload: object  # frozen dataclass or pydantic model; small, JSON-able, picklable
    digest: str  # of class and payload; the same digest means the same engine
    contract: type[E]  # which the class derives from

    @classmethod
    def of(cls, path: str, payload: object, contract: type[E]) -> EngineSpec[E]:
        """The spec of class `path` with `payload`."""
        if isinstance(payload, BaseModel):
            plain: object = payload.model_dump(mode="json")
        elif dataclasses.is_dataclass(payload) and not isinstance(payload, type):
            plain = dataclasses.asdict(payload)
        else:
            plain = payload
        text = json.dumps([path, plain], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(cls=path, payload=payload, digest=digest, contract=contract)

    def check_offers(self, method: str) -> None:
        """Raise ValueError unless the contract has a method of this name."""
        offered = callable_methods(self.contract)
        if method not in offered:
            raise ValueError(
                f"{self.cls} offers no {method!r}. Its contract {self.contract.__name__} has "
                f"{sorted(offered)}."
            )


class StoreSpec(Settings):
    """Where batches are."""

    store_uri: str = Field(description="Store of batches.")
    store_options: dict[str, str | int | float | bool] = Field(description="Its arguments.")
    cache_bytes: int = Field(0, ge=0, description="Batch cache of this process, in bytes.")

    def open_store(self) -> Store:
        """The store, with a cache of this process."""
        return Store(self.store_uri, self.store_options, cache_bytes=self.cache_bytes)
