"""What a step asks of the store: requests and bytes of the flow and of every worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines.failures import ClusterLost
from engines.workers.on_worker import store_usage
from storage.objects.usage import COUNTER, Usage
from tasks.results import Metrics

if TYPE_CHECKING:
    from engines.workers.cluster import Cluster

TIMEOUT = 5.0  # seconds for the workers' answers; a metric is not worth more


class StoreUsage:
    """Counts since the last look. What a worker that died counted after it is lost."""

    def __init__(self) -> None:
        self._before: dict[str, Usage] = {"": COUNTER.total()}

    def since_last(self, cluster: Cluster) -> Metrics:
        """Metrics of a step; empty when the workers do not answer in time."""
        try:
            found: dict[str, Usage] = cluster.ask(
                cluster.client.run, store_usage, on_error="ignore", timeout=TIMEOUT
            )
        except (TimeoutError, ClusterLost):  # a commit does not fail for the want of a metric
            return {}
        now = {"": COUNTER.total(), **found}
        total = Usage()
        for process, count in now.items():
            total += count - self._before.get(process, Usage())
        self._before = now
        return {
            "store/requests": float(total.requests),
            "store/bytes_read": float(total.bytes_read),
            "store/bytes_written": float(total.bytes_written),
        }
