"""One piece of a step's work, as every stage has it: its key, where its result lies, and its tries.

What a second attempt finds again is decided here: the key of a piece is made of all that its result
depends on, the object that it writes is named by the key, and so are its call and its mark.

What leaves nothing that is found by a key has tries alone (`attempted`): an update, a snapshot, a
version. So has `logprob`, whose columns are not called as the stage is. Parts (tasks/parts.py) are
numbered as they are spread, whatever their places are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from engines.workers.engine import Engine
from engines.workers.pool import EnginePool
from tasks.run.attempts import Attempt
from tasks.run.retries import attempted
from tasks.run.stage_view import StageView

E = TypeVar("E", bound=Engine)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """See the module's docstring."""

    run: StageView
    step: int
    name: str
    key: str  # of what the result depends on (key_of)
    shard: int | None = None  # counted from 1; None: it is of the whole step
    part: str = ""  # which of several of the shard's, or of the step's

    @property
    def out_key(self) -> str:
        """Of the object that it writes."""
        number = "-".join(filter(None, (str(self.shard or ""), self.part))) or 1
        return self.run.files.stage_key(self.step, self.name, number, self.key)

    def finished(self) -> dict[str, Any] | None:
        """What an attempt that finished has recorded; None where none has."""
        return self.run.files.finished(self.out_key)

    def finish(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Mark it as finished; of two attempts the record that stands is the first's."""
        return self.run.files.finish(self.out_key, dict(record))

    @contextlib.contextmanager
    def attempted(self) -> Iterator[Attempt]:
        """Record a try of it in the run, and in the task's log."""
        with attempted(self.run, self.step, self.name, self.shard) as attempt:
            yield attempt

    def call(
        self,
        pool: EnginePool[E],
        method: Callable[Concatenate[E, P], R],
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> R:
        """A try of it that is a call on one of a pool's engines; arguments are given by name."""
        with self.attempted() as attempt:
            return self.ask(attempt, pool, method, *nothing, **arguments)

    def ask(
        self,
        attempt: Attempt,
        pool: EnginePool[E],
        method: Callable[Concatenate[E, P], R],
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> R:
        """The call within a try that has begun."""
        call_id = self.run.call_id(self.step, f"{method.__name__}-{self.out_key}")
        return pool.call(method, call_id, attempt.assignment, *nothing, **arguments)
