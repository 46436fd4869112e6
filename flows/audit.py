"""Check a run: its counts, its chain of commits, and every byte that its records vouch for.

refrain audit RUN
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "audit",
    "Check a run: prompts drawn = trained + filtered + dropped + in flight at every commit, "
    "recounted from the batches; every ref resolves and every digest matches, by reading the "
    "bytes; commits form an unbroken chain; objects that nothing names are listed. Read only.",
    "tasks.commands.audit:answer",
    option("--strict", action="store_true", help="let orphans count as a problem"),
)

if __name__ == "__main__":
    sys.exit(main())
