"""What processes of users' code have in common: how they begin, what they send, what is told of them.

Such a process is started anew whenever the code hangs: only the standard library is imported here.
It may run under an older Python (3.10) than its owner. Messages go as pickles over a socket pair. A
message that is packed holds plain values only: to read it imports nothing, so a user's file may have
modules of any name, `engines` too.
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
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from engines.processes.parent_death import die_with_parent
from engines.processes.process_setup import name_in_ps

OURS = ("configs", "engines")  # packages that are loaded when a user's file comes
_TRACE_CHARACTERS = 8000  # of a traceback; its end tells most
Packed: TypeAlias = "tuple[str, dict[str, Any]]"


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
            message = connection.recv()
        except (EOFError, ConnectionError):
            return
        reply = answer(message)
        try:
            connection.send(reply)
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
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def traceback_of(error: Exception, callers: Collection[str]) -> str:
    """The traceback from the user's code on, its end if it is long.

    `callers`: files whose frames are left out at its beginning: they called the user's code.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_next and frames.tb_frame.f_code.co_filename in callers:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return text if len(text) <= _TRACE_CHARACTERS else f"…{text[-_TRACE_CHARACTERS:]}"


def shortened(text: str, characters: int) -> str:
    """The beginning of a text, with an ellipsis where it is longer."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The answer to a first message where the user's code cannot be loaded: the user's mistake."""

    error: str  # one sentence for the user


def by_name(*kinds: type) -> Mapping[str, type]:
    """The classes of a protocol's messages, for `unpacked`."""
    return {kind.__name__: kind for kind in kinds}


def packed(message: Any) -> Packed:
    """A message, which is a dataclass, as plain values: the name of its class, and its fields."""
    return type(message).__name__, {
        field.name: attrgetter(field.name)(message) for field in fields(message)
    }


def unpacked(message: Packed, kinds: Mapping[str, type]) -> Any:
    """The message that `packed` took apart, of one of these classes."""
    kind, values = message
    return kinds[kind](**values)
