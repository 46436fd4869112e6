"""Workers that others started come back by themselves after a cut from their scheduler."""

from __future__ import annotations

from typing import Any

from distributed import Nanny, NannyPlugin

# What a worker says that has lost its scheduler, or that the scheduler has given up meanwhile.
CUT_OFF = ("worker-handle-scheduler-connection-broken", "worker-heartbeat-missing")


class ComesBack(NannyPlugin):
    """On a nanny: starts the worker again that ends because it was cut off from the scheduler.

    Dask's worker tells its nanny then to end, too, and nobody would start that one again
    (https://github.com/dask/distributed/issues/6350 is why a worker does not reconnect). The new one
    waits for the scheduler. Where the scheduler ends on purpose it says so, and nanny and worker end.
    """

    name = "refrain-comes-back"
    idempotent = True  # a second flow that joins the cluster

    def setup(self, nanny: Nanny) -> None:
        """Called by Dask when the nanny has joined."""
        end = nanny.handlers["close_gracefully"]

        def close_gracefully(**words: Any) -> Any:
            return None if words.get("reason") in CUT_OFF else end(**words)

        nanny.handlers["close_gracefully"] = close_gracefully
