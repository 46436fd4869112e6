"""List the runs of a store: state, steps, reward, when, how large.

refrain runs [store.uri=…] [--sizes]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "runs",
    "List the runs of a store, the one that was at work last first.",
    "tasks.commands.runs:answer",
    option("--last", type=int, default=20, metavar="N", help="so many [20]; 0: all"),
    option("--sizes", action="store_true", help="with the bytes of each, for which all is listed"),
    of_store=True,
)

if __name__ == "__main__":
    sys.exit(main())
