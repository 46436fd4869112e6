"""What happens: each module of this folder is a command, `refrain NAME`.

Here every command begins, before any other of our modules is imported.
"""

import os
import sys
from pathlib import Path

PACKAGES = ("configs", "engines", "flows", "storage", "tasks")


def module_folders(path: list[str], ours: str, working: str) -> list[str]:
    """Where modules are looked for: `path` with our packages first and the working folder last.

    A user's `tasks.py` or `configs/`, in the working folder or in one of PYTHONPATH, hides none of
    ours, and a user's other modules in the working folder are found. It is named as often as before:
    Prefect puts it in while it imports a flow, and takes one away then.

    ours: the folder of our packages, which the path of an editable installation need not name.
    """
    folders = [folder for folder in path if ours == working or os.path.abspath(folder) != working]
    first = next((i for i, folder in enumerate(folders) if _holds_ours(folder)), len(folders))
    again = max(1, len(path) - len(folders))
    if [ours] != [os.path.abspath(folder) for folder in folders[first : first + 1]]:
        folders.insert(first, ours)
    return folders if ours == working else [*folders, *[working] * again]


def _holds_ours(folder: str) -> bool:
    """Whether modules of our packages' names are found in a folder, ours or another's."""
    places = (Path(folder, name) for name in PACKAGES)
    return any(
        place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places
    )


sys.path[:] = module_folders(sys.path, str(Path(__file__).parents[1]), os.getcwd())

from configs.process import begin_process  # noqa: E402 (ours, by the path above)
from configs.terminal_text import print_text  # noqa: E402

try:
    begin_process()
except ValueError as error:
    print_text(error, error=True)
    sys.exit(2)
