"""What a run asks of its store, flow and workers together."""

from __future__ import annotations

from collections.abc import Mapping

from storage.objects.usage import COUNTER, Usage
from tasks.results import Metrics


class StoreUsage:
    """Requests and bytes that the flow and every worker asked of the store, since the last look.

    A worker tells its count with the result of each call. What one that died counted after its last
    call is lost.
    """

    def __init__(self) -> None:
        self._before: dict[str, Usage] = {"": COUNTER.total()}

    def since_last(self, told: Mapping[str, Usage]) -> Metrics:
        """Metrics of a step; `told`: what each worker process has asked since it began."""
        now = {"": COUNTER.total(), **told}
        total = Usage()
        for process, count in now.items():
            total += count - self._before.get(process, Usage())
        self._before = now
        return {
            "store/requests": float(total.requests),
            "store/bytes_read": float(total.bytes_read),
            "store/bytes_written": float(total.bytes_written),
        }
