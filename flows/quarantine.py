"""Show which rows of the data a run draws no more, and let rows in again.

refrain quarantine RUN [--readmit ROWS|all]
"""

from __future__ import annotations

import sys

from tasks.commands import command as commands


def main() -> int:
    """List or readmit rows in quarantine; returns the exit code."""
    words = commands.parser(
        "quarantine",
        "Rows of the data that leave the draw by data.quarantine: why, since which step, how often "
        "each was drawn and what it got. --readmit lets rows in again, with counts that begin anew: "
        "from the next draw of the run on, whether it is running or is resumed.",
    )
    words.add_argument(
        "--readmit", metavar="ROWS", help="numbers of rows, such as 3,17, or all: let them in again"
    )
    words.add_argument("--limit", type=int, default=50, metavar="N", help="rows shown [50]")

    def work(request: commands.Request) -> commands.Answer:
        from tasks.commands.quarantine import answer

        return answer(request)

    return commands.run(words, work)


if __name__ == "__main__":
    sys.exit(main())
