"""Who else is on this machine: people whose processes run beside ours."""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

PEOPLE = range(1000, 60_000)  # numbers of users that login.defs gives to people


def other_people(processes: Path = Path("/proc")) -> list[str]:
    """Names of the other people with processes here, as far as the kernel shows them; sorted."""
    users = set()
    with contextlib.suppress(OSError), os.scandir(processes) as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has ended
                    users.add(entry.stat(follow_symlinks=False).st_uid)
    return sorted(map(_name, (users & set(PEOPLE)) - {os.getuid()}))


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
