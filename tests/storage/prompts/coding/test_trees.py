"""Trees: packed alike wherever they come from, laid over each other, and never leading out."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import fsspec
import pytest

from storage.prompts.coding import trees
from storage.prompts.coding.repositories import repository
from storage.prompts.coding.trees import File, Link, keep, kept, overlaid, packed, unpacked

TREE: trees.Tree = {
    "a.py": File(b"a"),
    "run.sh": File(b"#!/bin/sh\n", executable=True),
    "deep/ü.txt": File("ü".encode()),
    "deep/link": Link("../a.py"),
}


def write(folder: Path) -> Path:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/ü.txt").write_text("ü")
    (folder / "a.py").write_text("a")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o700)
    (folder / "deep/link").symlink_to("../a.py")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__/a.pyc").write_bytes(b"compiled")
    return folder


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_folders_tar_files_and_bundles_are_the_same_tree(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    assert repository(str(folder)) == TREE
    for name, top in (("a.tar", ""), ("b.tar.gz", "one-1.0"), ("c.tar.xz", "one")):
        mode = {"tar": "w", "gz": "w:gz", "xz": "w:xz"}[name.rpartition(".")[2]]
        with tarfile.open(tmp_path / name, mode) as tar:  # type: ignore[call-overload]
            tar.add(folder, top)
        assert repository(str(tmp_path / name)) == TREE
    git(folder, "init", "--quiet")
    git(folder, "add", "a.py", "run.sh", "deep")
    git(folder, "commit", "--quiet", "-m", "before")
    first = git(folder, "rev-parse", "HEAD")
    (folder / "a.py").write_text("the solution")
    git(folder, "commit", "--quiet", "-am", "after")
    git(folder, "bundle", "create", "--quiet", str(tmp_path / "one.bundle"), "HEAD")
    assert repository(str(tmp_path / "one.bundle"), first) == TREE
    assert repository(str(tmp_path / "one.bundle"))["a.py"] == File(b"the solution")
    with pytest.raises(ValueError, match=r"the git bundle .* cannot be checked out: "):
        repository(str(tmp_path / "one.bundle"), "0" * 40)
    memory = fsspec.filesystem("memory")
    memory.pipe({"/repo/a.py": b"a", "/repo/deep/b.py": b"b"})
    assert repository("memory://repo") == {"a.py": File(b"a"), "deep/b.py": File(b"b")}


def test_a_tree_is_kept_once_by_a_digest_that_is_the_same_everywhere(cache: Path) -> None:
    digest = keep(TREE)
    assert digest == keep(dict(reversed(TREE.items())))
    assert digest == "sha256:78b1776e939840d656ceae513da43006b1b3f53a3849c60af4e6cadb3111f56f"
    assert kept(digest) == TREE
    assert len(os.listdir(cache / "refrain/trees")) == 1
    assert unpacked(packed(TREE), "it") == TREE


@pytest.mark.parametrize(
    ("over", "found"),
    [
        ({"a": File(b"2")}, {"a": File(b"2"), "d/b": File(b"1"), "l": Link("d")}),
        ({"l/x": File(b"2")}, {"a": File(b"1"), "d/b": File(b"1"), "l/x": File(b"2")}),
        ({"d": File(b"2")}, {"a": File(b"1"), "d": File(b"2"), "l": Link("d")}),
        ({"a/b/c": File(b"2")}, {"a/b/c": File(b"2"), "d/b": File(b"1"), "l": Link("d")}),
        ({}, {"a": File(b"1"), "d/b": File(b"1"), "l": Link("d")}),
    ],
)
def test_trees_over_each_other(over: trees.Tree, found: trees.Tree) -> None:
    tree = {"a": File(b"1"), "d/b": File(b"1"), "l": Link("d")}
    assert overlaid(tree, over) == found


def tar_of(*infos: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info in infos:
            tar.addfile(info, io.BytesIO(b"\0" * info.size))
    return out.getvalue()


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


@pytest.mark.parametrize(
    ("infos", "said"),
    [
        ([entry("../out")], "is no path within a repository"),
        ([entry("/etc/passwd")], "is no path within a repository"),
        ([entry("a"), entry("b", tarfile.SYMTYPE, "/etc")], "leads out of it to /etc"),
        ([entry("a"), entry("b", tarfile.SYMTYPE, "../x")], "leads out of it to ../x"),
        ([entry("a"), entry("b", tarfile.FIFOTYPE)], "is no file, folder or link"),
        ([entry("a"), entry("b", tarfile.LNKTYPE, "nothing")], "cannot be read as a tar file"),
    ],
)
def test_odd_tar_files_are_refused(infos: list[tarfile.TarInfo], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        unpacked(tar_of(*infos), "it")


def test_what_is_no_repository_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("no tar file")
    with pytest.raises(ValueError, match="cannot be read as a tar file"):
        repository(str(tmp_path / "text"))
    with pytest.raises(ValueError, match="there is no repository"):
        repository(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="cannot be read"):
        repository("nowhere://x")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="has fifo, which is no file"):
        repository(str(tmp_path))
    monkeypatch.setattr(trees, "LARGEST", 10)
    with pytest.raises(ValueError, match="a repository has at most"):
        trees.checked({"a": File(b"x" * 11)}, "it")
    with pytest.raises(ValueError, match="larger than a repository may be"):
        unpacked(tar_of(entry("a", size=11)), "it")
