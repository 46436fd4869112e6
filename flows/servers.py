"""Servers for a team as plain processes: Prefect and MLflow, until Ctrl-C.

    refrain servers [--host ADDRESS] [--folder FOLDER]

The databases come from the environment, passwords included, because a command line can be read by
everybody on the machine:

    PREFECT_SERVER_DATABASE_CONNECTION_URL=postgresql+asyncpg://USER:PASSWORD@HOST/prefect
    MLFLOW_BACKEND_STORE_URI=postgresql+psycopg2://USER:PASSWORD@HOST/mlflow

Without them both use SQLite files in the folder, which one person at a time is well served by.
The servers listen on loopback unless --host says otherwise; put a proxy with TLS and a login before
them then (docs/security.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.reporting.output import until_nobody_reads


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
    parser.add_argument("--folder", default=".refrain/servers", help="for logs and SQLite files")
    asked = parser.parse_args(list(words) or sys.argv[1:])
    from tasks.launch.team_servers import serve  # late: --help answers at once

    return serve(asked.host, asked.prefect_port, asked.mlflow_port, Path(asked.folder).absolute())


if __name__ == "__main__":
    sys.exit(main())
