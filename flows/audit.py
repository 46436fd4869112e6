"""Check a run: its counts, its chain of commits, and every byte that its records vouch for.

refrain audit RUN
"""

from __future__ import annotations

import sys

from tasks.commands import command as commands


def main() -> int:
    """Audit a run; returns the exit code."""
    words = commands.parser(
        "audit",
        "Check a run: prompts drawn = trained + filtered + dropped + in flight at every commit, "
        "recounted from the batches; every ref resolves and every digest matches, by reading the "
        "bytes; commits form an unbroken chain; objects that nothing names are listed. Read only.",
    )
    words.add_argument("--strict", action="store_true", help="let orphans count as a problem")

    def work(request: commands.Request) -> commands.Answer:
        from tasks.commands.audit import answer

        return answer(request)

    return commands.run(words, work)


if __name__ == "__main__":
    sys.exit(main())
