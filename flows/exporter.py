"""Tell Prometheus of all runs of this machine at one address, until Ctrl-C.

    refrain exporter [FOLDER …] [--host ADDRESS] [--port PORT]

A run leaves its metrics in the folder tracking.metrics_folder, which is .refrain/metrics in its
working folder unless it is set; those are the FOLDERs to name. A run that has ended, or died, is told
for a day with what it said last. infra/prometheus.yaml reads this address, infra/alerts.yaml has
rules for it, and infra/grafana.json shows it (docs/monitoring.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.reporting.output import until_nobody_reads

HOUR = 3600.0  # seconds


@until_nobody_reads
def main(words: Sequence[str] = ()) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="refrain exporter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", default=[".refrain/metrics"])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at [127.0.0.1]")
    parser.add_argument("--port", type=int, default=9464, help="[9464]")
    parser.add_argument(
        "--keep-hours", type=float, default=24.0, metavar="N",
        help="hours for which a run is told that says nothing more [24]",
    )  # fmt: skip
    parser.add_argument("--certificate", metavar="PEM", help="of the server, for TLS")
    parser.add_argument("--key", metavar="PEM", help="of that certificate")
    arguments = parser.parse_args(list(words) or sys.argv[1:])
    if (arguments.certificate is None) != (arguments.key is None):
        parser.error("--certificate and --key go together")
    from tasks.reporting.exporter import serve  # late: --help answers at once

    folders = [Path(folder).absolute() for folder in arguments.folders]
    return serve(
        folders,
        arguments.keep_hours * HOUR,
        arguments.host,
        arguments.port,
        arguments.certificate,
        arguments.key,
    )


if __name__ == "__main__":
    sys.exit(main())
