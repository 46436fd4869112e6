"""New SQLite databases of Prefect and MLflow, copied from one that was migrated before.

Their first migrations take 5 s and 2 s of CPU in each new folder, and lead to the same tables every
time. So the first database of each release of theirs is made as a template in the user's cache
folder; where nothing can be kept there, each is made anew.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

from configs.environment import cache_folder
from configs.private_folder import private_folder


def new_database(database: Path, package: str, migrate: Callable[[Path], object]) -> None:
    """Make a database with its tables, unless there is a file already.

    Args:
        database: Where it comes to lie, whole or not at all.
        package: The distribution whose release says which tables it has.
        migrate: Makes all tables in a new file, and leaves the file closed.
    """
    if database.exists():
        return
    try:
        template = _template(package, migrate)
        _appear(database, partial(shutil.copyfile, template))
    except (OSError, RuntimeError):  # no cache folder, or no home that it could be in
        _appear(database, migrate)


def _template(package: str, migrate: Callable[[Path], object]) -> Path:
    template = private_folder(cache_folder()) / f"{package}-{version(package)}.db"
    if not template.exists():
        _appear(template, migrate)
    return template


def _appear(file: Path, make: Callable[[Path], object]) -> None:
    """Have a file made beside its place and put there; the first of several stays."""
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f"{file.name}-") as beside:
        made = Path(beside, file.name)
        make(made)
        try:
            os.link(made, file)
        except OSError:  # another has made it, or the file system has no links
            if not file.exists():
                made.rename(file)
