"""Write a policy version as a folder of its own, which transformers and vLLM load as it is.

refrain export RUN --to FOLDER [--version V] [--adapter]
"""

from __future__ import annotations

import sys

from tasks.commands import command as commands


def main() -> int:
    """Export a version; returns the exit code."""
    words = commands.parser(
        "export",
        "Write a policy version as a folder of its own: safetensors, config and tokenizer. Versions "
        "in the store are such folders too, save those that are stored as the difference from "
        "another one (store.whole_every), and those of LoRA runs: here they are merged into their "
        "base. Every tensor is checked on the way.",
    )
    words.add_argument(
        "--to", required=True, metavar="FOLDER", help="a folder that is not there yet"
    )
    words.add_argument("--version", type=int, metavar="V", help="of the run [its last]")
    words.add_argument(
        "--adapter",
        action="store_true",
        help="of a LoRA run: the adapter alone, for PEFT",
    )

    def work(request: commands.Request) -> commands.Answer:
        from tasks.commands.export import answer

        return answer(request)

    return commands.run(words, work)


if __name__ == "__main__":
    sys.exit(main())
