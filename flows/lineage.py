"""Tell what made a policy version, and where a sample or a prompt went.

refrain lineage RUN --version V | --sample ID | --prompt ROW
"""

from __future__ import annotations

import sys

from tasks.commands import command as commands


def main() -> int:
    """Tell an origin; returns the exit code."""
    words = commands.parser(
        "lineage",
        "From weights to the samples, token spans, prompt rows, rewards and reward code that made "
        "them, and back. Each sample shows the digest of the weights that its engine held, the "
        "worker and the attempt. Steps of the run that this one was forked from are included.",
    )
    what = words.add_mutually_exclusive_group(required=True)
    what.add_argument("--version", type=int, metavar="V", help="what made this policy version")
    what.add_argument("--sample", type=int, metavar="ID", help="where this sample came from")
    what.add_argument("--prompt", type=int, metavar="ROW", help="every sample of this dataset row")
    words.add_argument(
        "--limit", type=int, default=20, metavar="N", help="rows read and shown [20]"
    )

    def work(request: commands.Request) -> commands.Answer:
        from tasks.commands.lineage import answer

        return answer(request)

    return commands.run(words, work)


if __name__ == "__main__":
    sys.exit(main())
