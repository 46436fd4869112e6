"""What the flow process may call on an engine, and how an engine is specified.

A contract is an abstract class below Engine, in a module without torch. Its abstract methods are what
the flow process calls; the engine's class derives from it, so that one that lacks a method cannot be
made, and a type checker compares what it takes and returns. A caller names a method by the contract's
own function: `pool.call(Scorer.score, …)`.

Contracts of the engines that sample and train are still to come: those have a table of names, REMOTE.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, overload

from pydantic import BaseModel

Memory = Literal["device", "host"]  # a GPU's own, or that of the machine
E = TypeVar("E", bound="Engine", covariant=True)  # the contract that an engine keeps
Kept = TypeVar("Kept", bound="Engine")


def check_remote(cls: type[Engine]) -> None:
    """Raise TypeError unless all that can be called on the class are annotated methods."""
    for name in cls.REMOTE:
        method = inspect.getattr_static(cls, name, None)
        if not inspect.isfunction(method):
            raise TypeError(
                f"{cls.__name__}.REMOTE: {name!r} names no method of the class. Define it or drop "
                "the entry."
            )
        _check_annotated(f"{cls.__name__}.REMOTE: {name!r}", method)
    for name, method in _promised(cls):
        _check_annotated(f"{cls.__name__}.{name}", method)


def _promised(cls: type) -> Iterator[tuple[str, Callable[..., object]]]:
    """The abstract methods that a class itself declares."""
    for name, member in vars(cls).items():
        if inspect.isfunction(member) and getattr(member, "__isabstractmethod__", False):
            yield name, member


def _check_annotated(where: str, method: Callable[..., object]) -> None:
    signature = inspect.signature(method)
    bare = [
        argument.name
        for argument in list(signature.parameters.values())[1:]
        if argument.annotation is inspect.Parameter.empty
    ]
    if bare or signature.return_annotation is inspect.Signature.empty:
        missing = ", ".join(bare) or "the return value"
        raise TypeError(f"{where}: {missing} has no annotation. Annotate the method fully.")


class Engine(ABC):  # noqa: B024 - contracts below it have the abstract methods
    """Base of every engine and of every contract; checks what can be called when one is defined.

    An engine's class is made with one argument, the payload of its EngineSpec.
    """

    REMOTE: ClassVar[tuple[str, ...]] = ()  # methods that can be called, besides the contracts'

    version: int | None = None  # policy version of the weights held, if any; for status reports

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        check_remote(cls)

    def close(self) -> None:  # noqa: B027 - an engine may hold nothing
        """Give devices, child processes and memory back."""

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
    """Base of engines whose ranks work together (engines/workers/gang.py).

    Every rank gets the same arguments. The result is rank 0's, save of the methods in CONCAT. A
    worker makes such engines, and all calls on them, in one thread, one after the other.
    """

    CONCAT: ClassVar[tuple[str, ...]] = ()  # of REMOTE: each rank gives its part, `concat` joins

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if unknown := sorted(set(cls.CONCAT) - set(cls.REMOTE)):
            raise TypeError(f"{cls.__name__}.CONCAT: {unknown[0]!r} is not in REMOTE. Add it.")
        concat = inspect.getattr_static(cls, "concat")
        own = concat is not vars(Ranked)["concat"] and isinstance(concat, staticmethod)
        if cls.CONCAT and not own:
            raise TypeError(
                f"{cls.__name__}.CONCAT needs a static method concat(method: str, parts: list)."
            )

    def join(
        self, rank: int, world: int, host: str, port: int, generation: int, timeout: float
    ) -> object:
        """Enter the process group of a generation, leaving an earlier one first; called by the gang.

        `host`:`port` is where rank 0 listens; `timeout` (seconds) bounds each phase, and an error
        names the phase that is stuck.
        """
        raise NotImplementedError(f"{type(self).__name__} has no join")

    @staticmethod
    def concat(method: str, parts: list) -> object:
        """The ranks' results of a method, in rank order, as one."""
        raise NotImplementedError(f"concat of {method}")


def callable_methods(cls: type[Engine]) -> tuple[str, ...]:
    """Every method of an engine class that can be called remotely."""
    promised = (name for base in reversed(cls.__mro__) for name, _ in _promised(base))
    own = ("join",) if issubclass(cls, Ranked) else ()
    return tuple(dict.fromkeys((*own, *promised, *cls.REMOTE)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec(Generic[E]):
    """An engine to build: its class by import path, its one argument, and the contract it keeps."""

    cls: str  # package.module:Class, imported on the worker only
    payload: object  # frozen dataclass or pydantic model; small, JSON-able, picklable
    digest: str  # of class and payload; the same digest means the same engine
    contract: type[Engine]  # which the class derives from

    @overload
    @classmethod
    def of(cls, path: str, payload: object) -> EngineSpec[Engine]: ...

    @overload
    @classmethod
    def of(cls, path: str, payload: object, contract: type[Kept]) -> EngineSpec[Kept]: ...

    @classmethod
    def of(
        cls, path: str, payload: object, contract: type[Engine] | None = None
    ) -> EngineSpec[Any]:
        """The spec of class `path` with `payload`; contract: None: no other than any engine's."""
        if isinstance(payload, BaseModel):
            plain: object = payload.model_dump(mode="json")
        elif dataclasses.is_dataclass(payload) and not isinstance(payload, type):
            plain = dataclasses.asdict(payload)
        else:
            plain = payload
        text = json.dumps([path, plain], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(cls=path, payload=payload, digest=digest, contract=contract or Engine)
