"""Write all that is known of a run into one folder, with a script that checks it without Refrain.

refrain dossier RUN --to FOLDER [--push OWNER/NAME]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "dossier",
    "Settings, lineage, digests of data and reward code, curves, evaluations, software versions, "
    "and verify.py, which checks every file of the folder and every object of the run in the "
    "store and needs nothing but Python. The run is audited first.",
    "tasks.commands.dossier:answer",
    option("--to", required=True, metavar="FOLDER", help="a folder that is not there yet"),
    option(
        "--push",
        metavar="OWNER/NAME",
        help="upload the folder to this model repository of the Hugging Face hub too",
    ),
)

if __name__ == "__main__":
    sys.exit(main())
