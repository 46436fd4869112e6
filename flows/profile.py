"""Say where the time of a committed step's update goes, and write a trace of it.

refrain profile RUN STEP [--to FILE]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "profile",
    "Make the update of a committed step twice more, the second time under torch's profiler: "
    "seconds by group of operations, those that take longest, on a GPU the share of the time in "
    "which it ran a kernel. A trace (chrome://tracing, perfetto.dev) is written beside. Starts train "
    "workers only, and leaves nothing in the store.",
    "tasks.commands.profile:answer",
    option("--to", metavar="FILE", help="of the trace [RUN-STEP.json.gz]"),
    cluster=True,
    after_run=("step", "STEP", "the committed step", int),
)

if __name__ == "__main__":
    sys.exit(main())
