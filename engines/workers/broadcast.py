"""One engine method on many workers by one message, for what every engine of a pool does at once.

A call as a Dask task costs the flow's client more than a millisecond and the scheduler nearly two,
a worker in a broadcast less than a tenth and a fifth of that. So a load of weights does not go to
each of a thousand engines in a task of its own. It passes by slots, which shards in flight may fill.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, TypeVar, cast

from engines.failures import CallDeadline, InfrastructureError, WorkerLost
from engines.workers import on_worker
from engines.workers.call_watch import SLICE
from engines.workers.calls import GRACE, STATUS, value_of
from engines.workers.cluster import Cluster, raise_if_set
from engines.workers.engine import Call
from engines.workers.messages import CallResult

if TYPE_CHECKING:
    from tornado.platform.asyncio import BaseAsyncIOLoop

R = TypeVar("R")  # what a call returns
LATE = 30.0  # seconds in which a broadcast must end once nobody runs its call any more


def submit_to_all(
    cluster: Cluster,
    pool: str,
    workers: Mapping[str, str],
    call: Call[R],
    *,
    deadline: float,
    cancel: threading.Event | None = None,
) -> dict[str, R | InfrastructureError]:
    """Make a call on workers of a pool at once; what each engine returned, or its failure.

    `workers`: name -> address. Returns name -> value, once all have ended; an InfrastructureError in
    its place says that the worker was lost, was killed at the deadline (seconds), or that its
    machinery failed.

    Raises what else an engine raised, CallCancelled (the calls themselves may go on), ClusterLost.
    """
    if not workers:
        return {}
    token = uuid.uuid4().hex
    args = (call, token, deadline + GRACE)
    answers, killed = _answers(cluster, list(workers.values()), args, token, deadline, cancel)

    def outcome(name: str, address: str) -> R | InfrastructureError:
        answer: CallResult[R] | Exception = answers[address]
        if isinstance(answer, CallResult):
            cluster.told(pool, answer)
            try:
                return value_of(answer, f"by {call.label} on worker {name} ({address})")
            except InfrastructureError as failure:
                return failure
        if address in killed:
            return CallDeadline(name, deadline, call.label)
        if isinstance(answer, InfrastructureError):  # it holds no host of engines (yet)
            return answer
        why = str(answer)
        if isinstance(answer, OSError):  # of the scheduler's connection, which says no more
            why = cluster.why_gone(address)
        return WorkerLost(name, f"{why}; {call.label} was under way{cluster.log_hint(name)}")

    return {name: outcome(name, address) for name, address in workers.items()}


def _answers(
    cluster: Cluster,
    addresses: list[str],
    args: tuple[Any, ...],
    token: str,
    deadline: float,
    cancel: threading.Event | None,
) -> tuple[Mapping[str, Any], frozenset[str]]:
    """What the workers answered, or why one did not; and who was killed for being late."""

    async def ask() -> dict[str, Any]:
        found: dict[str, Any] = await cluster.client.run(
            on_worker.aside, *args, workers=addresses, on_error="return"
        )
        return found

    cluster.check()
    loop = cast("BaseAsyncIOLoop", cluster.client.loop).asyncio_loop
    asked = asyncio.run_coroutine_threadsafe(ask(), loop)
    until, killed = time.monotonic() + deadline, frozenset[str]()
    while not wait([asked], timeout=SLICE).done:
        raise_if_set(cancel)
        cluster.check()
        if time.monotonic() < until:
            continue
        late = _still_running(cluster, addresses, token)
        if not late:
            raise cluster.why_lost("the Dask scheduler has not passed on what workers answered")
        killed |= frozenset(cluster.kill(late))
        until = time.monotonic() + LATE
    try:
        return asked.result(), killed
    except OSError as error:
        cluster.check()
        raise cluster.why_lost(f"the Dask scheduler cannot be reached: {error}") from error


def _still_running(cluster: Cluster, addresses: Sequence[str], token: str) -> list[str]:
    """The workers that still run a call, or do not say."""

    async def is_late(address: str) -> bool:
        try:
            asked = cluster.client.run(on_worker.status, workers=[address])
            status = (await asyncio.wait_for(asked, STATUS))[address]
        except TimeoutError:
            return True
        except (OSError, ValueError):
            return False  # it is gone, and the broadcast knows
        return any(one.token == token for one in status.running)

    async def all_of_them() -> list[bool]:
        return await asyncio.gather(*(is_late(address) for address in addresses))

    late: list[bool] = cluster.ask(all_of_them)
    return [address for address, is_so in zip(addresses, late, strict=True) if is_so]
