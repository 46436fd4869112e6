"""What processes of users' code have in common: how they begin, and what is told of that code.

Such a process is started anew whenever the code hangs: only the standard library is imported here.
It may run under an older Python (3.10) than its owner.
"""

from __future__ import annotations

import faulthandler
import hashlib
import inspect
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engines.processes.parent_death import die_with_parent
from engines.processes.process_setup import name_in_ps

OURS = ("configs", "engines")  # packages that are loaded when a user's file comes
_TRACE_CHARACTERS = 8000  # of a traceback; its end tells most


def begin(owner: int, dump: int, name: str = "refrain code") -> None:
    """Prepare this process for a user's code.

    Args:
        owner: pid of the process that started it, with which it dies.
        dump: file descriptor that gets the stacks at a crash in native code, and at SIGUSR1.
        name: that `ps` and `top` show.
    """
    name_in_ps(name)
    die_with_parent(owner)
    faulthandler.enable(dump)
    faulthandler.register(signal.SIGUSR1, dump)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer_calls(connection: Connection, answer: Callable[[Any], object]) -> None:
    """Answer one message after the other until the owner is gone, killed in the middle of one too."""
    while True:
        try:
            asked = connection.recv()
        except (EOFError, ConnectionError):
            return
        answered = answer(asked)
        try:
            connection.send(answered)
        except ConnectionError:
            return


def give_way(file: str) -> None:
    """Let a file's own folder come first, and put our modules out of the way of its imports.

    What is loaded of ours works on; messages hold plain values from now on.
    """
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]


def source_digests(code: Callable[..., Any]) -> tuple[str, str]:
    """sha256 of a function's or class's own lines, and of the file that they are in.

    Either is empty where there is nothing to read: made at run time, or not in Python.
    """
    plain = inspect.unwrap(code)
    plain = plain if inspect.isroutine(plain) or inspect.isclass(plain) else type(plain)
    try:
        source = _sha256(inspect.getsource(plain).encode())
    except (OSError, TypeError):
        source = ""
    try:
        module = _sha256(Path(inspect.getfile(plain)).read_bytes())
    except (OSError, TypeError):
        module = ""
    return source, module


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those among these packages that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def traceback_of(error: Exception, ours: Collection[str]) -> str:
    """The traceback from the user's code on, its end if it is long.

    `ours`: files whose frames are left out at its beginning: they called the user's code.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_next and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return text if len(text) <= _TRACE_CHARACTERS else f"…{text[-_TRACE_CHARACTERS:]}"


def shortened(text: str, characters: int) -> str:
    """The beginning of a text, with an ellipsis where it is longer."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
