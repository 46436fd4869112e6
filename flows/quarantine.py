"""Show which rows of the data a run draws no more, and let rows in again.

refrain quarantine RUN [--readmit ROWS|all]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "quarantine",
    "Rows of the data that leave the draw by data.quarantine: why, since which step, how often "
    "each was drawn and what it got. --readmit lets rows in again, with counts that begin anew: "
    "from the next draw of the run on, whether it is running or is resumed.",
    "tasks.quarantine.command:answer",
    option(
        "--readmit", metavar="ROWS", help="numbers of rows, such as 3,17, or all: let them in again"
    ),
    option("--limit", type=int, default=50, metavar="N", help="rows shown [50]"),
)

if __name__ == "__main__":
    sys.exit(main())
