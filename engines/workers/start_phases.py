"""What engines that start, or train, are at, asked of their workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from engines.failures import ClusterLost
from engines.workers import on_worker
from engines.workers.cluster import Cluster
from engines.workers.messages import HostStatus, RunningCall

ANSWER = 2.0  # seconds for which a worker is waited for
MOST = 16  # workers that are asked


def start_phases(cluster: Cluster) -> dict[str, str]:
    """Worker -> what the engine that it starts reported last; of workers that answer at once."""
    return {
        worker: call.phase
        for worker, calls in running_calls(cluster).items()
        for call in calls
        if call.phase
    }


def running_calls(
    cluster: Cluster, pools: Sequence[str | None] = (None,)
) -> dict[str, tuple[RunningCall, ...]]:
    """Worker -> the calls that it runs; of workers that answer at once, the first ones of each pool.

    pools: whose; None: all together.
    """
    share = MOST // max(1, len(pools))
    try:
        addresses = [
            one.address
            for pool in pools
            for one in list(cluster.members(pool, max_age=10.0).values())[: max(1, share)]
        ]
        answers: Mapping[str, HostStatus] = cluster.ask(_statuses, cluster, addresses)
    except (ClusterLost, TimeoutError, OSError, ValueError):
        return {}
    return {host.worker: host.running for host in answers.values()}


async def _statuses(cluster: Cluster, addresses: Sequence[str]) -> dict[str, HostStatus]:
    """Of the workers that answer; one that is busy holds up none of the others."""

    async def ask(address: str) -> dict[str, HostStatus]:
        asking = cluster.client.run(on_worker.status, workers=[address], on_error="ignore")
        try:
            return dict(await asyncio.wait_for(asking, ANSWER))
        except (TimeoutError, OSError, ValueError):
            return {}

    found: dict[str, HostStatus] = {}
    for answer in await asyncio.gather(*map(ask, addresses)):
        found |= answer
    return found
