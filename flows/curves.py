"""Take a run's curves to Weights & Biases, Trackio or a table, at any time.

refrain curves RUN --to csv|wandb|trackio
"""

from __future__ import annotations

import sys

from tasks.commands import command as commands


def main() -> int:
    """Export the curves; returns the exit code."""
    words = commands.parser(
        "curves",
        "Every metric of every step, from the commits of a run that goes on or has ended, and its "
        "evaluations. Doing it again brings the other side up to date.",
    )
    words.add_argument(
        "--to", required=True, choices=("csv", "wandb", "trackio"), help="where they go"
    )
    words.add_argument("--file", metavar="FILE", help="of the table [RUN.csv]")
    words.add_argument(
        "--project", default="refrain", metavar="NAME", help="of wandb or trackio [refrain]"
    )

    def work(request: commands.Request) -> commands.Answer:
        from tasks.commands.curves import answer

        return answer(request)

    return commands.run(words, work)


if __name__ == "__main__":
    sys.exit(main())
