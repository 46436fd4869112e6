"""Show what the model was asked and what it wrote.

refrain samples RUN[@STEP] [--best | --worst | --failed | --group G]
refrain samples RUN --evaluation SUITE@VERSION [--best | …]
refrain samples RUN[@STEP] --grep REGEX [--status failed] [--reward 0.5:] [--where FIELD=VALUE]
refrain samples RUN@STEP --diff STEP [--row ROW]
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
    option("--grep", metavar="REGEX", help="those with this in prompt or answer, and how often"),
    option("--status", choices=("ok", "truncated", "failed"), help="those of a status"),
    option("--reward", metavar="LOW:HIGH", help="those with such a reward; 0.5: is 0.5 or more"),
    option(
        "--where", metavar="FIELD=VALUE", help="those whose row of the data has it, as task=gsm8k"
    ),
    option(
        "--diff",
        type=int,
        metavar="STEP",
        help="the same rows of the data in another step, or in another version's evaluation, "
        "word by word; the largest change of the reward first",
    ),
    option("--row", type=int, metavar="ROW", help="with --diff: this row of the data alone"),
    option("--limit", type=int, default=4, metavar="N", help="samples shown [4]"),
    option(
        "--characters",
        type=int,
        default=2000,
        metavar="N",
        help="shown of each text [2000]; 0: all",
    ),
    at_step=True,
    paged=True,
)

if __name__ == "__main__":
    sys.exit(main())
