"""Show what a run said: its flow's log, tracebacks included, and its workers' output.

refrain logs RUN [--workers | --worker NAME] [--lines N] [--follow]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, one_of, option

main = Command(
    "logs",
    "The end of what a run said, on the machine where its flow is or was: the logs of its tasks, "
    "with the tracebacks of reward functions and of what ended it, or what its workers printed.",
    "tasks.commands.logs:answer",
    one_of(
        option("--workers", action="store_true", help="what workers printed"),
        option("--worker", metavar="NAME", help="what one worker printed, of Slurm's"),
    ),
    option("--lines", type=int, default=200, metavar="N", help="lines shown [200]; 0: all"),
    option("--follow", action="store_true", help="go on showing what is added"),
)

if __name__ == "__main__":
    sys.exit(main())
