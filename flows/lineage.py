"""Tell what made a policy version, and where a sample or a prompt went.

refrain lineage RUN --version V | --sample ID | --prompt ROW
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, one_of, option

main = Command(
    "lineage",
    "From weights to the samples, token spans, prompt rows, rewards and reward code that made "
    "them, and back. Each sample shows the digest of the weights that its engine held, the "
    "worker and the attempt. Steps of the run that this one was forked from are included.",
    "tasks.commands.lineage:answer",
    one_of(
        option("--version", type=int, metavar="V", help="what made this policy version"),
        option("--sample", type=int, metavar="ID", help="where this sample came from"),
        option("--prompt", type=int, metavar="ROW", help="every sample of this dataset row"),
        required=True,
    ),
    option("--limit", type=int, default=20, metavar="N", help="rows read and shown [20]"),
)

if __name__ == "__main__":
    sys.exit(main())
