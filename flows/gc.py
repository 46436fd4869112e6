"""Remove from a run's store what its settings do not keep; without --delete, say what that is.

refrain gc RUN [--delete] [store.keep_steps=… store.keep_versions=… …]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "gc",
    "Remove from a run's store what its settings do not keep: old policy versions, snapshots and "
    "batches, and what writers that died left. Other settings of the run's store.keep_* can be "
    "given. What resuming, replaying or forking from a kept step needs stays, what other runs share, "
    "and registered versions with an alias. Without --delete nothing is removed.",
    "tasks.commands.gc:answer",
    option("--delete", action="store_true", help="remove it; without: say what would be"),
    option(
        "--tracking",
        metavar="URI",
        help="MLflow's address, where the run's versions are registered [that of the run]",
    ),
    option(
        "--without-registry",
        action="store_true",
        help="do not ask MLflow: registered versions go too, whatever their alias",
    ),
)

if __name__ == "__main__":
    sys.exit(main())
