"""The commit of a working folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from configs.environment import working_tree


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", folder, *named, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_folder_under_git_has_a_commit_and_may_differ_from_it(tmp_path: Path) -> None:
    git(tmp_path, "init")
    assert working_tree(tmp_path) is None, "nothing is committed"
    (tmp_path / "reward.py").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    tree = working_tree(tmp_path)
    assert tree is not None
    assert (tree.commit, tree.changed) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "other.py").write_text("new")
    tree = working_tree(tmp_path)
    assert tree is not None and tree.changed


def test_a_folder_without_git_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert working_tree(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert working_tree(Path(__file__).parent) is None, "git is not installed"
