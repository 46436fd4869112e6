"""Show a run in the browser: curves, samples token by token, groups, episodes, lineage.

refrain board RUN
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "board",
    "A page of this machine that shows a run from its store alone, one that goes on too: curves, "
    "samples with their tokens coloured, groups, episodes with pictures, and where each came from. "
    "The link has its key.",
    "tasks.board.server:answer",
    option("--port", type=int, default=0, metavar="N", help="of 127.0.0.1 [one that is free]"),
)

if __name__ == "__main__":
    sys.exit(main())
