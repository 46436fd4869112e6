"""Make a committed update again from its stored batch, and compare the weights.

refrain replay RUN STEP [--episodes]
"""

from __future__ import annotations

import sys

from tasks.commands import command as commands


def main() -> int:
    """Replay a step; returns the exit code."""
    words = commands.parser(
        "replay",
        "Make the update of a committed step again: the trainer's state before it is rebuilt from "
        "a snapshot and the stored batches, the step's batch is applied, and the digest of the "
        "version that comes out is compared with the committed one. Equal bits are demanded where "
        "sums have the same order again, else a stated tolerance; it says which, and why. Starts "
        "train workers only, and writes nothing to the store.",
        cluster=True,
        after_run=("step", "STEP", "the committed step", int),
    )

    words.add_argument(
        "--episodes",
        action="store_true",
        help="step the environments of its episodes again instead, and compare what they say",
    )

    def work(request: commands.Request) -> commands.Answer:
        if request.arguments.episodes:
            from tasks.commands import replay_episodes

            return replay_episodes.answer(request)
        from tasks.commands.replay import answer

        return answer(request)

    return commands.run(words, work)


if __name__ == "__main__":
    sys.exit(main())
