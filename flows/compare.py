"""Tell in what two runs differ: settings, code, data, curves, and the first step that differs.

refrain compare RUN1 RUN2 [--of METRIC]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "compare",
    "What changed between two runs of a store: settings, code, digests of the data, curves, "
    "evaluations on the same rows, and the first step that differs, in its prompts, samples, "
    "rewards, batch or weights. Steps that a fork has from its parent are compared too.",
    "tasks.commands.compare:answer",
    option(
        "--of",
        action="append",
        default=[],
        metavar="METRIC",
        help="show this metric step by step, such as reward/mean; may be given several times",
    ),
    after_run=("other", "RUN2", "name of the other run", str),
)

if __name__ == "__main__":
    sys.exit(main())
