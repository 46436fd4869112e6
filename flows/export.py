"""Write a policy version as a folder of its own, which transformers and vLLM load as it is.

refrain export RUN --to FOLDER [--version V] [--adapter]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "export",
    "Write a policy version as a folder of its own: safetensors, config and tokenizer. Versions "
    "in the store are such folders too, save those that are stored as the difference from "
    "another one (store.whole_every), those of LoRA runs, which are merged into their base here, and "
    "those of mixtures, whose experts stand apart here as in the model's files. Every tensor is "
    "checked on the way.",
    "tasks.commands.export:answer",
    option("--to", required=True, metavar="FOLDER", help="a folder that is not there yet"),
    option("--version", type=int, metavar="V", help="of the run [its last]"),
    option("--adapter", action="store_true", help="of a LoRA run: the adapter alone, for PEFT"),
)

if __name__ == "__main__":
    sys.exit(main())
