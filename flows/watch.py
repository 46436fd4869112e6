"""Watch a run that works elsewhere: its phases, the time left, and a line for each step.

refrain watch RUN [store.uri=…] [--steps N]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "watch",
    "Show what a run is doing until it ends, from its store alone. Ctrl-C ends the watching, not "
    "the run. Exit code 0: it finished; 1: it stopped before, or its flow died.",
    "tasks.commands.watch:answer",
    option("--steps", type=int, default=5, metavar="N", help="earlier steps that are shown [5]"),
)

if __name__ == "__main__":
    sys.exit(main())
