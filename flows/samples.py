"""Show what the model was asked and what it wrote.

refrain samples RUN[@STEP] [--best | --worst | --failed | --group G] [--task TASK]
refrain samples RUN --evaluation SUITE@VERSION [--best | …]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, one_of, option

main = Command(
    "samples",
    "Prompts and answers of a step as text, special tokens included, each with its reward, the "
    "policy versions that wrote it, worker and attempt. Without a choice: the best, the middle "
    "and the worst by reward, and one whose scoring failed.",
    "tasks.commands.samples:answer",
    one_of(
        option("--best", action="store_true", help="highest rewards first"),
        option("--worst", action="store_true", help="lowest rewards first"),
        option("--failed", action="store_true", help="those whose scoring failed"),
        option("--group", type=int, metavar="G", help="all answers to the prompt of a group"),
        option(
            "--episode",
            type=int,
            metavar="E",
            help="one sample by its number, all turns of it, and of its other players",
        ),
    ),
    option(
        "--evaluation",
        metavar="SUITE@VERSION",
        help="samples of an evaluation in place of a step's",
    ),
    option("--task", metavar="TASK", help="of one of the run's tasks alone"),
    option("--limit", type=int, default=4, metavar="N", help="samples shown [4]"),
    option(
        "--characters",
        type=int,
        default=2000,
        metavar="N",
        help="shown of each text [2000]; 0: all",
    ),
    at_step=True,
)

if __name__ == "__main__":
    sys.exit(main())
