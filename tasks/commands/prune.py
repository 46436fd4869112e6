"""Removing old flow runs from a command line."""

from __future__ import annotations

import argparse
import datetime

from configs.overrides import ConfigError, change
from configs.pruning import PruneConfig
from configs.terminal_text import print_text
from tasks.reporting.output import until_nobody_reads

FAILED, BAD_INPUT = 1, 2  # exit codes


@until_nobody_reads
def main(description: str) -> int:
    """Remove them from the server that PREFECT_API_URL names; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="refrain prune",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="days=…, flows=[…]")
    words = parser.parse_args().words
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    from tasks.launch.pruning import prune
    from tasks.launch.registration import check_server
    from tasks.launch.server import ServerError

    try:
        config = change(PruneConfig, {}, words)
        check_server(PREFECT_API_URL.value())
        with get_client(sync_client=True) as client:
            done = prune(client, config, datetime.datetime.now(datetime.UTC))
    except ConfigError as error:
        print_text(error, error=True)
        return BAD_INPUT
    except ServerError as error:
        print_text(error, error=True)
        return FAILED
    print_text(f"Removed {done.flow_runs} flow runs and {done.artifacts} artifacts.")
    return 0
