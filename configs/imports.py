"""Objects named by an import path: engines, and users' own functions.

A path is `package.module:name` or `path/to/file.py:name`. Only the standard library is used
here, because every reward process starts with this module.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Collection
from operator import attrgetter
from types import ModuleType
from typing import Any

from configs.process import machine_folder


def imported(path: str) -> Any:
    """The object at an import path; ValueError, in one sentence, if there is none.

    A file is loaded by its location, once in a process, under a name that no other module has, and
    that processes which this one starts can import. Its folder is put at the end of sys.path: what it
    imports by the name of a loaded module is that module, here Refrain's own `configs` and the like.
    A reward process lets the folder come first (engines/rewards/child.py).
    """
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ValueError(
            f"'{path}' is no import path. Write package.module:NAME or path/to/file.py:NAME."
        )
    if is_file(place) and not os.path.isfile(place):
        raise ValueError(
            f"there is no file '{place}' on {os.uname().nodename}. A machine that runs workers needs "
            "it under the same path as the others do, as on a file system that they share"
        )
    try:
        module = _file_module(place) if is_file(place) else importlib.import_module(place)
    except Exception as error:  # the module's own lines ran: any error may come out
        if isinstance(error, ModuleNotFoundError) and _within(place, error.name):
            raise ValueError(
                f"there is no module '{error.name}' for '{path}'. Install it, start from its "
                "folder, or name its file: path/to/file.py:NAME"
            ) from error
        raise ValueError(f"'{place}' cannot be imported: {described(error)}") from error
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        kind = "file" if is_file(place) else "module"
        raise ValueError(f"{kind} '{place}' has no '{name}'") from error


def imported_class(path: str) -> type:
    """The class at an import path; ValueError if there is none."""
    value = imported(path)
    if not isinstance(value, type):
        raise ValueError(f"{path} is a {type(value).__name__}, not a class")
    return value


def is_file(place: str) -> bool:
    """Whether the part of an import path before the colon names a file rather than a module."""
    return place.endswith(".py")


def _file_module(file: str) -> ModuleType:
    """The module that a file holds, loaded at the first call."""
    file = os.path.abspath(file)
    folder, base = os.path.split(file)
    stem = re.sub(r"\W", "_", base.removesuffix(".py"))
    name = f"file_{hashlib.sha256(file.encode()).hexdigest()[:8]}_{stem}"
    if name in sys.modules:
        return sys.modules[name]
    for place in (folder, _offered(name, file)):
        if place not in sys.path:
            sys.path.append(place)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _offered(name: str, file: str) -> str:
    """A folder in which the name of a file's module leads to the file.

    Processes that this one starts afresh, as multiprocessing does by `spawn`, get its sys.path, and
    functions by the name of their module.
    """
    folder = str(machine_folder("files"))
    with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", delete=False) as temporary:
        temporary.write(_OFFER.format(file=file))
    os.replace(temporary.name, os.path.join(folder, f"{name}.py"))
    return folder


_OFFER = """import importlib.util, sys
spec = importlib.util.spec_from_file_location(__name__, {file!r})
module = sys.modules[__name__] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


def described(error: BaseException, most: int = 500, ours: Collection[str] = (__file__,)) -> str:
    """An error's type and text, and the line that raised it.

    Args:
        error: the error.
        most: characters of the text that are kept.
        ours: files whose lines do not count: they only raise what a caller did.
    """
    text = f"{type(error).__name__}: {error}"
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours]
    if not frames or isinstance(error, SyntaxError):  # which names its line by itself
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"


def _within(module: str, missing: str | None) -> bool:
    """Whether the module that is missing is this one or a package around it."""
    return missing is not None and f"{module}.".startswith(f"{missing}.")
