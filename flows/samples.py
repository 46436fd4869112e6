"""Show what the model was asked and what it wrote.

refrain samples RUN[@STEP] [--best | --worst | --failed | --group G]
refrain samples RUN --evaluation SUITE@VERSION [--best | …]
"""

from __future__ import annotations

import sys

from tasks.commands import command as commands


def main() -> int:
    """Show samples; returns the exit code."""
    words = commands.parser(
        "samples",
        "Prompts and answers of a step as text, special tokens included, each with its reward, the "
        "policy versions that wrote it, worker and attempt. Without a choice: the best, the middle "
        "and the worst by reward, and one whose scoring failed.",
        at_step=True,
    )
    which = words.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="highest rewards first")
    which.add_argument("--worst", action="store_true", help="lowest rewards first")
    which.add_argument("--failed", action="store_true", help="those whose scoring failed")
    which.add_argument(
        "--group", type=int, metavar="G", help="all answers to the prompt of a group"
    )
    which.add_argument(
        "--episode",
        type=int,
        metavar="E",
        help="one sample by its number, all turns of it, and of its other players",
    )
    words.add_argument(
        "--evaluation",
        metavar="SUITE@VERSION",
        help="samples of an evaluation in place of a step's",
    )
    words.add_argument("--limit", type=int, default=4, metavar="N", help="samples shown [4]")
    words.add_argument(
        "--characters",
        type=int,
        default=2000,
        metavar="N",
        help="shown of each text [2000]; 0: all",
    )

    def work(request: commands.Request) -> commands.Answer:
        from tasks.commands.samples import answer

        return answer(request)

    return commands.run(words, work)


if __name__ == "__main__":
    sys.exit(main())
