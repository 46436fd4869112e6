"""Folders that belong to one user of a machine that several use.

A name in /tmp can be guessed, and so be made first by somebody else: to read what is put there, or
to have files of theirs taken for ours. Only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def private_folder(folder: Path) -> Path:
    """A folder that only this user can open, made where there is none; returns it.

    Raises OSError where it is a link or somebody else's, or where others could have put files into
    it or could put another one in its place. One that others could only read is closed to them.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    above = folder.parent.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{folder.parent} can be written by everyone")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to the user with the number {status.st_uid}")
        # A group with the user's own number has one member: many systems make folders writable by it.
        group = 0 if status.st_gid == status.st_uid else stat.S_IWGRP
        if status.st_mode & (group | stat.S_IWOTH):
            raise PermissionError(f"{folder} can be written by others")
        if status.st_mode & 0o077:
            os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    return folder


def machine_folder(name: str, place: str | None = None) -> Path:
    """A folder of this user's on this machine's own disk, the same for all processes.

    It is below refrain-UID in the folder of temporary files, or in `place`. Where that is somebody
    else's it is a new one, which others do not find.
    """
    place = tempfile.gettempdir() if place is None else place
    try:
        return private_folder(private_folder(Path(place, f"refrain-{os.getuid()}")) / name)
    except OSError:
        return private_folder(Path(tempfile.mkdtemp(prefix="refrain-", dir=place), name))
