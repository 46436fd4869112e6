"""A long answer on a terminal, read page by page."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from configs.environment import given

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def paged(out: Console) -> Iterator[None]:
    """On a terminal, have what is printed go through $PAGER, or `less`; `PAGER=cat` is none.

    As with git, `less` ends by itself where all fits on the screen (F) and shows colours (R), unless
    LESS is set.
    """
    words = shlex.split(given(["PAGER"]).get("PAGER", "less")) if out.is_terminal else []
    if not words or words == ["cat"] or shutil.which(words[0]) is None:
        yield
        return
    with out.capture() as captured:
        yield
    settings = {"LESS": "FRX", **os.environ}
    reader = subprocess.Popen(words, stdin=subprocess.PIPE, env=settings)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pager's to understand
    try:
        with suppress(BrokenPipeError):  # it was left before its end
            reader.communicate(captured.get().encode())
        reader.wait()
    finally:
        signal.signal(signal.SIGINT, before)
