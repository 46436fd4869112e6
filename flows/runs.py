"""List the runs of a store: state, steps, reward, age, size, and where each is or was made.

refrain runs [store.uri=…] [--no-sizes]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "runs",
    "List the runs of a store, the one that was at work last first.",
    "tasks.commands.runs:answer",
    option("--last", type=int, default=20, metavar="N", help="so many [20]; 0: all"),
    option(
        "--no-sizes", action="store_true", help="without bytes, for which all objects are listed"
    ),
    of_store=True,
)

if __name__ == "__main__":
    sys.exit(main())
