"""Show what a run said: its flow's log, tracebacks included, and its workers' output.

python -m flows.logs RUN [--workers | --worker NAME] [--lines N] [--follow]
"""

from __future__ import annotations

import sys

from tasks.commands import command as commands


def main() -> int:
    """Show logs; returns the exit code."""
    words = commands.parser(
        "logs",
        "The end of what a run said, on the machine where its flow is or was: the logs of its tasks, "
        "with the tracebacks of reward functions and of what ended it, or what its workers printed.",
    )
    which = words.add_mutually_exclusive_group()
    which.add_argument("--workers", action="store_true", help="what workers printed")
    which.add_argument("--worker", metavar="NAME", help="what one worker printed, of Slurm's")
    words.add_argument(
        "--lines", type=int, default=200, metavar="N", help="lines shown [200]; 0: all"
    )
    words.add_argument("--follow", action="store_true", help="go on showing what is added")

    def work(request: commands.Request) -> commands.Answer:
        from tasks.commands.logs import answer

        return answer(request)

    return commands.run(words, work)


if __name__ == "__main__":
    sys.exit(main())
