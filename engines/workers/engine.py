"""What the flow process may call on an engine: the REMOTE table, and how an engine is specified."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

Memory = Literal["device", "host"]  # a GPU's own, or that of the machine


def check_remote(cls: type[Engine]) -> None:
    """Raise TypeError unless every name in REMOTE is an annotated method of the class."""
    for name in cls.REMOTE:
        where = f"{cls.__name__}.REMOTE: {name!r}"
        method = inspect.getattr_static(cls, name, None)
        if not inspect.isfunction(method):
            raise TypeError(f"{where} names no method of the class. Define it or drop the entry.")
        signature = inspect.signature(method)
        bare = [
            argument.name
            for argument in list(signature.parameters.values())[1:]
            if argument.annotation is inspect.Parameter.empty
        ]
        if bare or signature.return_annotation is inspect.Signature.empty:
            missing = ", ".join(bare) or "the return value"
            raise TypeError(f"{where}: {missing} has no annotation. Annotate the method fully.")


class Engine:
    """Base of every engine; checks the REMOTE table when a subclass is created.

    A subclass is made with one argument, the payload of its EngineSpec.
    """

    REMOTE: ClassVar[tuple[str, ...]] = ()  # methods that the flow process may call; no other

    version: int | None = None  # policy version of the weights held, if any; for status reports

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        check_remote(cls)

    def close(self) -> None:
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
    return (*(("join",) if issubclass(cls, Ranked) else ()), *cls.REMOTE)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """An engine to build: its class by import path and its one argument."""

    cls: str  # package.module:Class, imported on the worker only
    payload: object  # frozen dataclass or pydantic model; small, JSON-able, picklable
    digest: str  # of class and payload; the same digest means the same engine

    @classmethod
    def of(cls, path: str, payload: object) -> EngineSpec:
        """The spec of class `path` with `payload`."""
        if isinstance(payload, BaseModel):
            plain: object = payload.model_dump(mode="json")
        elif dataclasses.is_dataclass(payload) and not isinstance(payload, type):
            plain = dataclasses.asdict(payload)
        else:
            plain = payload
        text = json.dumps([path, plain], sort_keys=True, default=str)
        return cls(cls=path, payload=payload, digest=hashlib.sha256(text.encode()).hexdigest()[:16])
