"""Servers for a team as plain processes: Prefect and MLflow, until Ctrl-C.

    refrain servers [--host ADDRESS] [--prefect-url URL] [--mlflow-url URL] [--folder FOLDER]
    refrain servers … --systemd > /etc/systemd/system/refrain-servers.service

The databases come from the environment, passwords included, because a command line can be read by
everybody on the machine:

    PREFECT_SERVER_DATABASE_CONNECTION_URL=postgresql+asyncpg://USER:PASSWORD@HOST/prefect
    MLFLOW_BACKEND_STORE_URI=postgresql+psycopg2://USER:PASSWORD@HOST/mlflow

Without them both use SQLite files in the folder, which one person at a time is well served by.
The servers listen on loopback unless --host says otherwise; others reach them there without TLS, or
by a proxy with TLS and a login (infra/Caddyfile, docs/security.md), whose addresses the two URLs are.
A server that ends is started again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.overrides import ConfigError
from configs.terminal_text import print_text
from tasks.reporting.output import until_nobody_reads

BAD_SETTINGS = 2  # exit code


@until_nobody_reads
def main(words: Sequence[str] = ()) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="refrain servers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at [127.0.0.1]")
    parser.add_argument("--prefect-port", type=int, default=4200)
    parser.add_argument("--mlflow-port", type=int, default=5000)
    parser.add_argument(
        "--prefect-url", metavar="URL", help="address by which others reach Prefect's server"
    )
    parser.add_argument("--mlflow-url", metavar="URL", help="the same of MLflow's")
    parser.add_argument("--folder", default=".refrain/servers", help="for logs and SQLite files")
    parser.add_argument(
        "--systemd", action="store_true", help="print a unit of systemd that runs this command"
    )
    line = list(words) or sys.argv[1:]
    arguments = parser.parse_args(line)
    folder = Path(arguments.folder).absolute()
    # Late: --help answers at once.
    from tasks.launch.systemd_unit import unit, writable
    from tasks.launch.team_servers import check_places, place, serve

    try:
        prefect = place("prefect", arguments.host, arguments.prefect_port, arguments.prefect_url)
        mlflow = place("mlflow", arguments.host, arguments.mlflow_port, arguments.mlflow_url)
        if arguments.systemd:
            check_places(prefect, mlflow)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # the unit may make none
            rest = [word for word in line if word != "--systemd"]
            print_text(unit("servers", rest, writable(folder)))
            return 0
        return serve(prefect, mlflow, folder)
    except ConfigError as error:
        print_text(error, error=True)
        return BAD_SETTINGS


if __name__ == "__main__":
    sys.exit(main())
