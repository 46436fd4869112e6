"""Workers on this machine for runs that join a cluster (cluster.kind=address), until Ctrl-C.

    refrain worker POOL [--workers N] [RECIPE] cluster.kind=address cluster.address=ADDRESS …
    refrain worker POOL … --systemd > /etc/systemd/system/refrain-worker.service

The recipe and the settings are those of the runs: the pool's slots, threads, GPUs and variables, and
the certificates of cluster.tls are taken from them. A worker that ends is started again; after a cut
from the scheduler, however long, it comes back.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.overrides import ConfigError
from configs.recipe import DEMO, load_recipe
from configs.terminal_text import print_text
from tasks.reporting.output import until_nobody_reads

BAD_SETTINGS = 2  # exit code


@until_nobody_reads
def main(words: Sequence[str] = ()) -> int:
    """Hold workers until Ctrl-C or SIGTERM; returns the exit code."""
    line = list(words) or sys.argv[1:]
    arguments = _parser().parse_intermixed_args(line)
    from tasks.launch.own_workers import check, hold  # late: --help answers at once
    from tasks.run.run_record import load_flow, settings_class

    rest = list(arguments.words)
    recipe = rest.pop(0) if rest and "=" not in rest[0] else DEMO
    try:
        config = load_recipe(settings_class(load_flow(arguments.flow)), recipe, rest)
        logs = Path(arguments.logs).absolute()
        if arguments.systemd:
            from tasks.launch.systemd_unit import unit

            check(config, arguments.pool, arguments.workers, arguments.name)
            run = [word for word in line if word != "--systemd"]
            print_text(unit("worker", run, ["LimitMEMLOCK=infinity", "TasksMax=infinity"]))
            return 0
        return hold(config, arguments.pool, arguments.workers, arguments.name, logs)
    except (ConfigError, ValueError) as error:
        print_text(error, error=True)
        return BAD_SETTINGS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="refrain worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pool", metavar="POOL", help="pool of the workers, such as rollout")
    parser.add_argument("words", nargs="*", metavar="RECIPE key=value")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="workers on this machine [1]"
    )
    parser.add_argument(
        "--name",
        default=f"{socket.gethostname()}",
        help="what tells this machine's workers from others': they are POOL-NAME-0 and so on "
        "[its host name]",
    )
    parser.add_argument("--flow", default="grpo", help="flow of the recipe [grpo]")
    parser.add_argument(
        "--logs", default=".refrain/workers", help="folder of the workers' logs [.refrain/workers]"
    )
    parser.add_argument(
        "--systemd", action="store_true", help="print a unit of systemd that runs this command"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
