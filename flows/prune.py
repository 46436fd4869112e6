"""Remove old flow runs from Prefect's database, with their task runs, logs and artifacts.

    refrain prune [days=30]

On the server that PREFECT_API_URL names. `refrain deploy prune` makes a deployment of it, whose
schedule can be switched on. Runs in the store and in MLflow are left alone.
"""

from __future__ import annotations

import argparse
import datetime
import sys

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.logging import get_run_logger

from configs.overrides import ConfigError, change
from configs.pruning import PruneConfig
from configs.terminal_text import print_text
from tasks.launch.pruning import Pruned
from tasks.launch.pruning import prune as pruned
from tasks.reporting.output import until_nobody_reads


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


@until_nobody_reads
def main() -> int:
    """Remove them from here; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="refrain prune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="days=…, flows=[…]")
    words = parser.parse_args().words
    from prefect.settings import PREFECT_API_URL

    from tasks.launch.registration import check_server
    from tasks.launch.server import ServerError

    try:
        config = change(PruneConfig, {}, words)
        check_server(PREFECT_API_URL.value())
        with get_client(sync_client=True) as client:
            done = pruned(client, config, datetime.datetime.now(datetime.UTC))
    except (ConfigError, ServerError) as error:
        print_text(error, error=True)
        return 2 if isinstance(error, ConfigError) else 1
    print_text(f"Removed {done.flow_runs} flow runs and {done.artifacts} artifacts.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
