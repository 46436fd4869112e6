"""One piece of a step's work, as every stage has it: its key, where its result lies, and its tries.

What a second attempt finds again is decided here: the key of a piece is made of all that its result
depends on, the object that it writes is named by the key, and so are its call and its mark.

What leaves nothing that is found by a key has tries alone (`attempted`): an update, a snapshot, a
version. So has `logprob`, whose columns are not called as the stage is. Prefect tries again what the
infrastructure failed at, and nothing else (OPTIONS).

A stage's work in parts is spread over the workers of the pool `cpu`; what comes back is refs. How
many parts there are follows from the work, never from the workers, so the results are the same on any
cluster. Parts are numbered as they are spread, whatever their places are called. A finished part has
a marker, so a retry, or a resumed run, makes the others only.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Concatenate, Generic, ParamSpec, TypedDict, TypeVar

from prefect import Task
from prefect.cache_policies import NO_CACHE, CachePolicy
from prefect.client.schemas.objects import TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.states import State
from pydantic import TypeAdapter

from engines.failures import InfrastructureError
from engines.workers.engine import Engine
from engines.workers.pool import Assignment, EnginePool
from storage.batches.refs import BatchRef
from storage.objects.errors import StoreUnavailable
from tasks.run.attempts import ATTEMPTS, Attempt, backoff
from tasks.run.contract import AttemptsView, StageView
from tasks.run.events import AttemptBegan, AttemptEnded, AttemptFailed

AGAIN = re.compile(r" \(attempt \d+\)$")  # in the name of a task run that was tried again
RETRYABLE = (InfrastructureError, StoreUnavailable)


class TaskOptions(TypedDict):
    """Arguments that every engine-driving task hands to `prefect.task`."""

    retries: int
    retry_delay_seconds: Any
    retry_condition_fn: Any
    cache_policy: CachePolicy
    persist_result: bool


def infrastructure_only(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed attempt is tried again; writes the cause to the task's log."""
    cause = state.result(raise_on_failure=False)
    again = isinstance(cause, RETRYABLE)
    logger = get_run_logger()
    if again and task_run.run_count < ATTEMPTS:
        # The dashboard's bars have names alone; the server takes this one with the next state.
        task_run.name = f"{AGAIN.sub('', task_run.name)} (attempt {task_run.run_count + 1})"
        logger.warning("Attempt %d failed and is tried again: %s", task_run.run_count, cause)
    elif again:
        logger.error("Attempt %d failed, and it was the last: %s", task_run.run_count, cause)
    return again


# Reuse of finished work is the store's (markers), so Prefect keeps neither cache nor results.
OPTIONS = TaskOptions(
    retries=ATTEMPTS - 1,
    retry_delay_seconds=[backoff(attempt) for attempt in range(1, ATTEMPTS)],
    retry_condition_fn=infrastructure_only,
    cache_policy=NO_CACHE,
    persist_result=False,
)


@contextlib.contextmanager
def attempted(
    run: AttemptsView, step: int, stage: str, shard: int | None = None
) -> Iterator[Attempt]:
    """Record an attempt in the run, and in the task's log: worker, attempt, duration, cause."""
    context = TaskRunContext.get()
    number = 1 if context is None else context.task_run.run_count
    attempt = Attempt(
        step=step,
        stage=stage,
        shard=shard,
        number=number,
        started=time.time(),
        assignment=Assignment(time=run.device_time),
    )
    run.tell(AttemptBegan(attempt=attempt))
    try:
        yield attempt
    except Exception as error:
        attempt.error = f"{type(error).__name__}: {error}"
        run.tell(AttemptFailed(attempt=attempt))
        raise
    finally:
        attempt.ended = time.time()
        run.tell(AttemptEnded(attempt=attempt))
        run.attempts.add(attempt)
        attempt.log()


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

    def batch(
        self,
        pool: EnginePool[E],
        method: Callable[Concatenate[E, P], BatchRef],
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> BatchRef:
        """The batch that a call writes: of an attempt that has finished, or of a new one."""
        if (done := self.finished()) is None:
            ref = self.call(pool, method, *nothing, **arguments)
            done = self.finish({"ref": ref.to_json()})
        return BatchRef.from_json(done["ref"])

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


def discard(run: StageView, parts: Sequence[Part[Any]], refs: Sequence[BatchRef]) -> None:
    """Remove what some parts came to, once it has served: no commit names it."""
    run.files.discard({part.out_key: ref.objects for part, ref in zip(parts, refs, strict=True)})


def slices(count: int, size: int, most: int) -> list[tuple[int, int]]:
    """Ranges of about `size` of `count` items, at most `most` of them, of nearly equal length.

    slices(5, 2, 10) == [(0, 1), (1, 3), (3, 5)]
    """
    parts = min(most, max(1, -(-count // size)))
    edges = [count * number // parts for number in range(parts + 1)]
    return list(pairwise(edges))
