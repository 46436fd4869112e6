"""Which commit of which repository the working folder of a run was at, where it is under git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from storage.objects.documents import StoredRecord

FIELD = "git"  # of run.json
TIMEOUT = 10.0  # seconds that git may take


class WorkingTree(StoredRecord):
    """The state of a working folder."""

    commit: str  # digest of the last commit
    changed: bool  # whether a file that is under git, or could be, differs from it


def working_tree(folder: Path) -> WorkingTree | None:
    """The state of a folder; None where it is not under git, or git is not installed."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    return WorkingTree(commit=commit, changed=bool(_git(folder, "status", "--porcelain")))


def _git(folder: Path, *words: str) -> str:
    """What git says; empty where it fails."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
