"""A stage's work in parts, spread over the workers of the pool `cpu`; what comes back is refs.

How many parts there are follows from the work, never from the workers, so the results are the same
on any cluster. A finished part has a marker, so a retry, or a resumed run, makes the others only.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from pydantic import TypeAdapter

from engines.workers.engine import Engine
from engines.workers.pool import EnginePool
from storage.batches.refs import BatchRef
from tasks.run.retries import attempted
from tasks.run.run import Run
from tasks.run.stage_view import StageView

E = TypeVar("E", bound=Engine)
P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Generic[Result]):
    """A call that makes one part."""

    pool: EnginePool[Any]
    method: Callable[..., Result]  # of the contract of its engines
    arguments: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        pool: EnginePool[E],
        method: Callable[Concatenate[E, P], Result],
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> Part[Result]:
        """A call as `pool.call` takes it; the argument out_key is made of the others."""
        assert not nothing, f"{method.__name__}: arguments are given by name"
        return Part(pool=pool, method=method, arguments=arguments)

    @property
    def out_key(self) -> str:
        """Of the object that it writes."""
        return str(self.arguments["out_key"])


def spread(
    run: StageView,
    step: int,
    stage: str,
    parts: Sequence[Part[Result]],
    kind: type[Result],
) -> list[Result]:
    """What the engines of one pool answer to each part, in their order.

    kind: of the answers: a BatchRef, or a carrier with a field `ref`.

    As many parts are under way as there are workers, one on each. Where one fails those that were
    not begun are given up, and its error is raised once those under way have ended.
    """
    if not parts:
        return []
    form = TypeAdapter(kind)

    def made(number: int, part: Part[Result]) -> Result:
        if (done := run.files.finished(part.out_key)) is None:
            with attempted(run, step, stage, number) as attempt:
                result = part.pool.call(
                    part.method,
                    run.call_id(step, f"{part.method.__name__}-{part.out_key}"),
                    attempt.assignment,
                    **part.arguments,
                )
            record = form.dump_python(result, mode="json")
            record = {"ref": record} if kind is BatchRef else record
            done = run.files.finish(part.out_key, record)
        return form.validate_python(done["ref"] if kind is BatchRef else done)

    with ThreadPoolExecutor(max(1, len(parts[0].pool.live()))) as threads:
        calls = [
            threads.submit(contextvars.copy_context().run, made, number, part)
            for number, part in enumerate(parts, 1)
        ]
        wait(calls, return_when=FIRST_EXCEPTION)
        if any(call.done() and call.exception() for call in calls):
            threads.shutdown(cancel_futures=True)
    for call in calls:
        if not call.cancelled() and (error := call.exception()) is not None:
            raise error
    return [call.result() for call in calls]


def discard(run: Run, parts: Sequence[Part[Any]], refs: Sequence[BatchRef]) -> None:
    """Remove what some parts came to, once it has served: no commit names it."""
    run.files.discard({part.out_key: ref.objects for part, ref in zip(parts, refs, strict=True)})


def slices(count: int, size: int, most: int) -> list[tuple[int, int]]:
    """Ranges of about `size` of `count` items, at most `most` of them, of nearly equal length.

    slices(5, 2, 10) == [(0, 1), (1, 3), (3, 5)]
    """
    parts = min(most, max(1, -(-count // size)))
    edges = [count * number // parts for number in range(parts + 1)]
    return list(pairwise(edges))
