"""What the flow process may call on an engine: the REMOTE table, and how an engine is specified."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import BaseModel

Split = Literal["rows", "none"]
Collect = Literal["concat", "reduce", "first", "all"]
COLLECTORS = ("concat", "reduce")  # static methods of the engine class that join ranks' results


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """How one engine method is called on a gang of ranks."""

    split: Split = "none"  # rows: each rank works on its own rows; none: all do the same
    collect: Collect = "first"  # first: rank 0's result; all: a list in rank order;
    # concat, reduce: what the engine class' static method of that name makes of the list


def check_remote(cls: type[Engine]) -> None:
    """Raise TypeError unless every name in REMOTE is an annotated method of the class."""
    for name, call in cls.REMOTE.items():
        where = f"{cls.__name__}.REMOTE[{name!r}]"
        if not isinstance(call, Call):
            raise TypeError(f"{where} is {call!r}. Make it a Call(split=…, collect=…).")
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
        if call.collect in COLLECTORS:
            collector = inspect.getattr_static(cls, call.collect, None)
            if not isinstance(collector, staticmethod):
                raise TypeError(
                    f"{where} collects by {call.collect!r}, but {cls.__name__} has no static "
                    f"method {call.collect}(method: str, parts: list). Define it."
                )


class Engine:
    """Base of every engine; checks the REMOTE table when a subclass is created.

    A subclass is made with one argument, the payload of its EngineSpec. Only the methods in REMOTE
    can be called from the flow process. A class with ranks also has `join` and `leave` (Ranked).
    """

    REMOTE: ClassVar[Mapping[str, Call]] = {}

    version: int | None = None  # policy version of the weights held, if any; for status reports

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        check_remote(cls)

    def close(self) -> None:
        """Give devices, child processes and memory back."""


class Ranked(Engine):
    """Base of engines whose ranks work together; the gang calls these two itself."""

    def join(
        self, rank: int, world: int, host: str, port: int, generation: int, timeout: float
    ) -> object:
        """Enter the process group of a generation, leaving an earlier one first.

        `host`:`port` is where rank 0 listens; `timeout` (seconds) bounds each phase, and an error
        names the phase that is stuck.
        """
        raise NotImplementedError(f"{type(self).__name__} has no join")

    def leave(self) -> None:
        """Leave the process group."""
        raise NotImplementedError(f"{type(self).__name__} has no leave")


GANG_CALLS: Mapping[str, Call] = {
    "join": Call(split="none", collect="all"),
    "leave": Call(split="none", collect="all"),
}


def calls_of(cls: type[Engine]) -> dict[str, Call]:
    """Every method of an engine class that can be called remotely."""
    return {**(GANG_CALLS if issubclass(cls, Ranked) else {}), **cls.REMOTE}


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
