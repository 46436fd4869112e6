"""Score the stored samples of a run with another reward: nothing is sampled, nothing rewritten.

refrain rescore RUN --reward package.module:function [--steps A-B]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "rescore",
    "Score stored samples with another reward function, keep the scores as new columns beside "
    "the old ones, and show what would change: mean, spread, correlation, ranks within groups, "
    "and the share of samples whose advantage changes sign.",
    "tasks.commands.rescore:answer",
    option(
        "--reward",
        required=True,
        metavar="package.module:function",
        help="a function as rewards.functions takes it; math, reasoning_gym; or the name of one of "
        "the run's rewards, such as a judge, whose stored answers are used again",
    ),
    option("--steps", metavar="A-B", help="committed steps [all]"),
)

if __name__ == "__main__":
    sys.exit(main())
