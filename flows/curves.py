"""Take a run's curves to Weights & Biases, Trackio, TensorBoard or a table, at any time.

refrain curves RUN --to csv|wandb|trackio|tensorboard
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

KINDS = ("csv", "wandb", "trackio", "tensorboard")

main = Command(
    "curves",
    "Every metric of every step, from the commits of a run that goes on or has ended, and its "
    "evaluations. Doing it again brings the other side up to date.",
    "tasks.commands.curves:answer",
    option("--to", required=True, choices=KINDS, help="where they go"),
    option("--file", metavar="FILE", help="of the table [RUN.csv]"),
    option("--project", default="refrain", metavar="NAME", help="there, not of csv [refrain]"),
)

if __name__ == "__main__":
    sys.exit(main())
