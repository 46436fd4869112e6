"""Temporary files of a cluster's processes: in a folder that goes when the cluster does.

A process that is killed cannot remove its own, and vLLM leaves some even at a proper end.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

LONGEST = 64  # characters of the folder; the path of a socket, vLLM's too, has room for 107
LASTING = "REFRAIN_LASTING"  # environment variable: where temporary files would be otherwise


def keep_temporary_files_in(folder: str) -> None:
    """Have this process and all below it make their temporary files in a folder.

    What torch has compiled stays where the next run finds it.
    """
    lasting = tempfile.gettempdir()
    os.environ[LASTING] = lasting
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{lasting}/torchinductor_{os.getuid()}")
    if len(folder) <= LONGEST:
        os.environ["TMPDIR"] = tempfile.tempdir = folder


def lasting_folder() -> Path:
    """Where a file is put that must outlast the cluster, for people to read."""
    return Path(os.environ.get(LASTING) or tempfile.gettempdir())
