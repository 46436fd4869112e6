"""Look at a run from another terminal, while it goes or later.

refrain inspect RUN
"""

from __future__ import annotations

import sys

from tasks.commands import command as commands


def main() -> int:
    """Inspect a run; returns the exit code."""
    words = commands.parser(
        "inspect",
        "Look at a run. While it goes: workers, their engines and policy versions, what runs now, "
        "the queue, retries and bytes moved. Always: its newest committed steps.",
    )
    words.add_argument("--steps", type=int, default=10, metavar="N", help="steps shown [10]")

    def work(request: commands.Request) -> commands.Answer:
        from tasks.commands.inspect import answer

        return answer(request)

    return commands.run(words, work)


if __name__ == "__main__":
    sys.exit(main())
