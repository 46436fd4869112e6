"""Trees: the files of a repository, as one value with a digest.

A tree is a dict of paths, relative and with /, so that two of them are laid over each other without a
disk. Packed, it is a tar file of the same bytes wherever it is made: sorted, without times or owners.
Packed trees are kept by their digest in the cache folder of each machine, where environments, which
may run under another interpreter, read them: only the standard library is imported.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import posixpath
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from configs.environment import cache_folder

LARGEST = 256 * 2**20  # bytes of a tree's files
MOST_FILES = 50_000
LEFT_OUT = (".git", "__pycache__")  # folders of which nothing is taken, wherever they stand
TIME = 946684800  # of every file, 2000-01-01, so that `ls -l` says the same each time


@dataclass(frozen=True, slots=True)
class File:
    """A file."""

    data: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link to a place in the same tree."""

    target: str  # relative to the link's folder


Tree: TypeAlias = "Mapping[str, File | Link]"  # {"src/a.py": File(b"…"), "b.py": Link("src/a.py")}


class Missing(LookupError):
    """A tree is not in this machine's cache, or is damaged there."""


def is_left_out(path: str) -> bool:
    """Whether a file is no part of a repository: git's own, or compiled Python."""
    return bool(set(LEFT_OUT) & set(path.split("/"))) or path.endswith((".pyc", ".pyo"))


def check_path(path: str) -> str:
    """A path within a tree; ValueError for another."""
    parts = path.split("/")
    if path.startswith("/") or not path or {"", ".", ".."} & set(parts) or "\0" in path:
        raise ValueError(f"{path!r} is no path within a repository")
    return path


def leads_inside(path: str, target: str) -> bool:
    """Whether a link at a path of a tree leads to a place within the tree."""
    if target.startswith("/") or not target or "\0" in target:
        return False
    place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return place != ".." and not place.startswith("../")


def checked(tree: Tree, name: str) -> Tree:
    """The same tree; ValueError, one sentence, where it is too large or reaches out of itself."""
    size = sum(len(one.data) for one in tree.values() if isinstance(one, File))
    if size > LARGEST or len(tree) > MOST_FILES:
        raise ValueError(
            f"{name} has {len(tree)} files of {size / 2**20:.0f} MiB; a repository has at most "
            f"{MOST_FILES} of {LARGEST >> 20} MiB"
        )
    for path, one in tree.items():
        check_path(path)
        if isinstance(one, Link) and not leads_inside(path, one.target):
            raise ValueError(f"{name} has the link {path}, which leads out of it to {one.target}")
    return tree


def overlaid(tree: Tree, over: Tree) -> Tree:
    """A tree with another laid over it, whose files are there as they are, whatever stood there.

    A file or link where `over` has a folder goes, and so does all that is in a folder where `over`
    has a file: {"tests": Link("mine")} and {"tests/test_a.py": …} give the latter alone.
    """
    folders = {folder for path in over for folder in _above(path)}
    kept = {
        path: one
        for path, one in tree.items()
        if path not in over and path not in folders and not any(f in over for f in _above(path))
    }
    return {**kept, **over}


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def packed(tree: Tree) -> bytes:
    """A tar file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(tree):
            one = tree[path]
            info = tarfile.TarInfo(path)
            info.mtime = TIME
            if isinstance(one, Link):
                info.type, info.linkname = tarfile.SYMTYPE, one.target
                tar.addfile(info)
            else:
                info.size, info.mode = len(one.data), 0o755 if one.executable else 0o644
                tar.addfile(info, io.BytesIO(one.data))
    return out.getvalue()


def unpacked(data: bytes, name: str) -> Tree:
    """The tree of a tar file, compressed or not; ValueError where it is none, or an odd one.

    A folder in which all of it lies, as of archives that GitHub makes, is left out.
    """
    tree: dict[str, File | Link] = {}
    size = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for info in tar:
                path = posixpath.normpath(info.name)
                if info.isdir() or is_left_out(path) or info.type == tarfile.XGLTYPE:
                    continue
                size += info.size
                if size > LARGEST or len(tree) >= MOST_FILES:
                    raise ValueError(
                        f"{name} is larger than a repository may be: {MOST_FILES} files, "
                        f"{LARGEST >> 20} MiB"
                    )
                if info.issym():
                    tree[path] = Link(info.linkname)
                elif info.isfile():
                    file = tar.extractfile(info)
                    assert file is not None
                    tree[path] = File(file.read(), bool(info.mode & 0o100))
                elif info.islnk():
                    tree[path] = tree[posixpath.normpath(info.linkname)]
                else:
                    raise ValueError(f"{name} has {info.name}, which is no file, folder or link")
    except (tarfile.TarError, EOFError, OSError, KeyError) as error:
        raise ValueError(f"{name} cannot be read as a tar file: {error}") from None
    return checked(_within(checked(tree, name)), name)


def _within(tree: Tree) -> Tree:
    tops = {path.partition("/")[0] for path in tree}
    if len(tops) != 1 or not all("/" in path for path in tree):
        return tree
    return {path.partition("/")[2]: one for path, one in tree.items()}


def of_folder(folder: str, name: str) -> Tree:
    """The tree of a folder of this machine; ValueError where it reaches out of itself."""
    tree: dict[str, File | Link] = {}
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if one not in LEFT_OUT)
        links = [one for one in folders if os.path.islink(os.path.join(place, one))]
        for file in [*files, *links]:
            full = os.path.join(place, file)
            path = os.path.relpath(full, folder)
            if is_left_out(path):
                continue
            if os.path.islink(full):
                tree[path] = Link(os.readlink(full))
            elif os.path.isfile(full):
                tree[path] = File(Path(full).read_bytes(), os.access(full, os.X_OK))
            else:
                raise ValueError(f"{name} has {path}, which is no file, folder or link")
    return checked(tree, name)


def keep(tree: Tree) -> str:
    """Put a tree into this machine's cache; its digest, sha256 of the packed tree."""
    data = packed(tree)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    place = _place(digest)
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(gzip.compress(data, 6, mtime=0))
        os.replace(file.name, place)
    return digest


def kept(digest: str) -> Tree:
    """The tree with a digest; Missing where this machine's cache has none, or another one."""
    place = _place(digest)
    try:
        data = gzip.decompress(place.read_bytes())
    except (OSError, EOFError) as error:
        raise Missing(f"the files {digest} cannot be read from {place.parent}: {error}") from None
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise Missing(f"{place} holds other files than its name says. Remove it, and start again")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tree: dict[str, File | Link] = {}
        for info in tar:
            if info.issym():
                tree[info.name] = Link(info.linkname)
            else:
                file = tar.extractfile(info)
                assert file is not None
                tree[info.name] = File(file.read(), bool(info.mode & 0o100))
    return tree


def _place(digest: str) -> Path:
    return cache_folder() / "trees" / f"{digest.removeprefix('sha256:')}.tar.gz"
