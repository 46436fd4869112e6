"""Our packages are found before a user's modules of the same names, whose others are found too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows import PACKAGES, module_folders

ROOT = str(Path(__file__).parents[2])
# As setuptools' editable installation finds packages: behind all folders.
EDITABLE = f"""
import sys
from importlib.machinery import PathFinder
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{ROOT!r}]) if name in {PACKAGES} else None
sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Finder)
sys.path.remove("")  # a command has its own folder there
from flows.__main__ import main
"""


def folder_of_a_user(place: Path) -> Path:
    """Modules with the names of ours, which end the process, and a reward."""
    for name in ("tasks", "storage", "flows", "configs/__init__", "engines/__init__"):
        file = place / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise SystemExit('a user module')")
    (place / "my_reward.py").write_text("def f(completions, **kw): return [1.0] * len(completions)")
    return place


WORDS = ["tiny", "steps=1", "--check", "rewards.functions.0.path=my_reward:f"]


@pytest.mark.parametrize(
    ("start", "on_path"),
    [
        pytest.param(["-c", f"{EDITABLE}\nmain(['grpo', *{WORDS}])"], "", marks=pytest.mark.slow),
        (["-c", f"from flows.__main__ import main\nmain(['grpo', *{WORDS}])"], ROOT),
        pytest.param(["-m", "flows.grpo", *WORDS], ROOT, marks=pytest.mark.slow),
        (["-c", f"from flows.__main__ import main\nmain(['grpo', *{WORDS}])"], f"{ROOT}:."),
    ],
    ids=["editable", "command", "module", "the working folder in PYTHONPATH"],
)
def test_a_users_modules_hide_none_of_ours(start: list[str], on_path: str, tmp_path: Path) -> None:
    folder = folder_of_a_user(tmp_path)
    if start[0] == "-m":  # of a module whose own package is hidden Python says so by itself
        (folder / "flows.py").unlink()
    elif not start[1].startswith(EDITABLE):
        start = ["-P", *start]
    done = subprocess.run(
        [sys.executable, *start],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": on_path},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "a run would start" in done.stdout


def test_the_order_of_folders(tmp_path: Path) -> None:
    ours, lib, other = "/ours", "/python/lib", str(folder_of_a_user(tmp_path))
    here = os.getcwd()
    assert module_folders([lib], ours, here) == [lib, ours, here]
    assert module_folders(["", lib], ours, here) == [lib, ours, here]
    found = module_folders([here, lib, here], ours, here)
    found.remove(here)  # as Prefect does, which had put one in to import a flow
    assert found == [lib, ours, here]
    assert module_folders([other, lib], ours, here) == [ours, other, lib, here]
    wheel = module_folders([here, lib, ROOT], ROOT, "/work")
    assert wheel == [here, lib, ROOT, "/work"] if here != ROOT else [here, lib, "/work"]
    assert module_folders([lib, other], other, other) == [lib, other], "in a checkout"
    assert module_folders([lib], other, other) == [lib, other]
