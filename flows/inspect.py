"""Look at a run from another terminal, while it goes or later.

refrain inspect RUN
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "inspect",
    "Look at a run. While it goes: workers, their engines and policy versions, what runs now, "
    "the queue, retries and bytes moved. Always: its size, how it grows, its newest committed steps.",
    "tasks.commands.inspect:answer",
    option(
        "--no-size",
        dest="size",
        action="store_false",
        help="leave out its size and growth, for which all of it is listed",
    ),
    option("--steps", type=int, default=10, metavar="N", help="steps shown [10]"),
)

if __name__ == "__main__":
    sys.exit(main())
