"""Building the wheel, of a copy of the sources: what setuptools leaves beside them stays out of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "engines", "flows", "infra", "storage", "tasks")


def built(home: Path) -> Path:
    """The wheel, which comes to a folder."""
    source = home / "source"
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "compose.env")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build], cwd=source, check=True, capture_output=True
    )
    shutil.rmtree(source)
    (wheel,) = home.glob("*.whl")
    return wheel
