"""Make a committed update again from its stored batch, and compare the weights.

refrain replay RUN STEP [--episodes]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "replay",
    "Make the update of a committed step again: the trainer's state before it is rebuilt from "
    "a snapshot and the stored batches, the step's batch is applied, and the digest of the "
    "version that comes out is compared with the committed one. Equal bits are demanded where "
    "sums have the same order again, else a stated tolerance; it says which, and why. Starts "
    "train workers only, and writes nothing to the store.",
    "tasks.commands.replay:answer",
    option(
        "--episodes",
        action="store_true",
        help="step the environments of its episodes again instead, and compare what they say",
    ),
    cluster=True,
    after_run=("step", "STEP", "the committed step", int),
)

if __name__ == "__main__":
    sys.exit(main())
