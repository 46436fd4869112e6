"""Whether a scheduler and workers that this process did not start keep our promises."""

from __future__ import annotations

from engines.cluster import Cluster
from engines.membership import allowed_failures
from engines.on_worker import examine
from engines.placement import check_seated


def check_scheduler(cluster: Cluster) -> None:
    """Refuse a scheduler that runs a dead worker's calls again."""
    allowed = cluster.ask(cluster.client.run_on_scheduler, allowed_failures)
    if allowed:
        raise ValueError(
            f"The scheduler at {cluster.config.address} re-runs a dead worker's calls "
            f"(allowed-failures = {allowed}), so an update could be applied twice. Start it with "
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=0."
        )


def check_members(cluster: Cluster) -> None:
    """Refuse workers that others started otherwise than the plan needs them."""
    members = cluster.members()
    answers = cluster.ask(
        cluster.client.run, examine, workers=[one.address for one in members.values()]
    )
    for one in members.values():
        traits = answers[one.address]
        if not traits.nanny:
            raise ValueError(
                f"Worker {one.name} at {one.address} has no nanny, so nobody would start it again. "
                "Start it without --no-nanny."
            )
        if traits.daemonic:
            raise ValueError(
                f"Worker {one.name} at {one.address} may not start processes, which vLLM does. "
                "Start it with DASK_DISTRIBUTED__WORKER__DAEMON=False."
            )
    check_seated(
        cluster.config.pools,
        {one.name: (one.pool, answers[one.address].node) for one in members.values()},
    )
