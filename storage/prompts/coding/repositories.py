"""Repositories by reference, as trees: folders, tar files, git bundles at any fsspec address."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from storage.prompts.coding.trees import File, Tree, checked, is_left_out, of_folder, unpacked

BUNDLE = (b"# v2 git bundle", b"# v3 git bundle")
GIT_SECONDS = 120.0


def repository(address: str, commit: str | None = None) -> Tree:
    """The files of a repository; ValueError, one sentence, where there is none.

    commit: of a git bundle, which is checked out; None: its HEAD. The history is left out: it may
    hold the solution.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(address)
        folder = filesystem.isdir(path)
        data: bytes = b"" if folder else filesystem.cat_file(path)
    except FileNotFoundError:
        raise ValueError(f"there is no repository {address}") from None
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"the repository {address} cannot be read: {error}") from None
    if folder:
        return _folder(filesystem, path, address)
    if data.startswith(BUNDLE):
        return _checked_out(data, address, commit)
    return unpacked(data, f"the repository {address}")


def _folder(filesystem: fsspec.AbstractFileSystem, path: str, address: str) -> Tree:
    if isinstance(filesystem, LocalFileSystem):
        return of_folder(path, f"the repository {address}")
    start = len(path.rstrip("/")) + 1
    places = {place[start:]: place for place in filesystem.find(path)}
    wanted = {inner: place for inner, place in places.items() if not is_left_out(inner)}
    found = {inner: File(filesystem.cat_file(place)) for inner, place in wanted.items()}
    return checked(found, f"the repository {address}")


def _checked_out(bundle: bytes, address: str, commit: str | None) -> Tree:
    with tempfile.TemporaryDirectory() as folder:
        file, tree = Path(folder, "bundle"), Path(folder, "tree")
        file.write_bytes(bundle)
        _git(["clone", "--quiet", "--no-checkout", str(file), str(tree)], address)
        _git(["-C", str(tree), "checkout", "--quiet", "--detach", commit or "HEAD", "--"], address)
        return of_folder(str(tree), f"the repository {address}")


def _git(words: list[str], address: str) -> None:
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", *words]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"the git bundle {address} needs git: {error}") from None
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:]
        raise ValueError(f"the git bundle {address} cannot be checked out: {said}")
