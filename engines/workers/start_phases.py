"""What engines that start are at, asked of their workers."""

from __future__ import annotations

from collections.abc import Mapping

from engines.failures import ClusterLost
from engines.workers import on_worker
from engines.workers.cluster import Cluster
from engines.workers.messages import HostStatus

ANSWER = 2.0  # seconds for which workers are waited for
MOST = 16  # workers that are asked


def start_phases(cluster: Cluster) -> dict[str, str]:
    """Worker -> what the engine that it starts reported last; of workers that answer at once."""
    try:
        addresses = [one.address for one in cluster.members(max_age=10.0).values()][:MOST]
        answers: Mapping[str, object] = cluster.ask(
            cluster.client.run,
            on_worker.status,
            workers=addresses,
            on_error="return",
            timeout=ANSWER,
        )
    except (ClusterLost, TimeoutError, OSError, ValueError):
        return {}
    found = (one for one in answers.values() if isinstance(one, HostStatus))
    return {host.worker: call.phase for host in found for call in host.running if call.phase}
