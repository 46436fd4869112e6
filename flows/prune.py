"""Remove old flow runs from Prefect's database, with their task runs, logs and artifacts.

    refrain prune [days=30]

On the server that PREFECT_API_URL names. `refrain deploy prune` makes a deployment of it, whose
schedule can be switched on. Runs in the store and in MLflow are left alone.
"""

from __future__ import annotations

import datetime
import sys

from configs.pruning import PruneConfig
from tasks.commands.prune import main

if __name__ == "__main__":  # first: --help and a refused word need nothing of what follows
    sys.exit(main(__doc__))

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.logging import get_run_logger

from tasks.launch.pruning import Pruned
from tasks.launch.pruning import prune as pruned


@flow(name="prune", persist_result=False)
def prune(config: PruneConfig) -> Pruned:
    """Remove flow runs that ended long ago from this Prefect server.

    Args:
        config: how long ago, and of which flows.
    """
    with get_client(sync_client=True) as client:
        done = pruned(client, config, datetime.datetime.now(datetime.UTC))
    get_run_logger().info("Removed %d flow runs and %d artifacts.", done.flow_runs, done.artifacts)
    return done
