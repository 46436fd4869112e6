"""Look at finished runs: the Prefect dashboard over the database that local runs left.

refrain dashboard
"""

from __future__ import annotations

import argparse
import signal
import sys

from configs.terminal_text import print_text
from tasks.launch.command_line import HOME
from tasks.reporting.output import until_nobody_reads


@until_nobody_reads
def main() -> int:
    """Serve the dashboard until Ctrl-C; returns the exit code."""
    argparse.ArgumentParser(prog="refrain dashboard", description=__doc__).parse_args()
    from tasks.launch.server import EmbeddedServer  # late: --help answers at once
    from tasks.launch.server_process import ServerError

    server = EmbeddedServer(HOME / "prefect")
    server.launch()
    try:
        server.wait()
        dashboard = server.dashboard
        place = dashboard.link if sys.stdout.isatty() else dashboard.asking
        print_text(f"Prefect  {place}    (Ctrl-C ends it)", flush=True)
        print_text(
            "MLflow   mlflow ui --backend-store-uri sqlite:///.refrain/mlflow.db", flush=True
        )
        signal.pause()
    except ServerError as error:
        print_text(error, error=True)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
