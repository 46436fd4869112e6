"""Digests of the files of a frozen model, by which what it has made is found again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.start_progress import report
from storage.objects.documents import Digester

WINDOW_BYTES = 16 * 2**20
WEIGHTS, WORDS = ("*.safetensors",), ("*.json", "*.jinja", "*.model", "*.txt")


def digest_of(directory: Path, patterns: Sequence[str]) -> str:
    """Of the names and bytes of a model's files."""
    total = Digester()
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern)}):
        total.update(f"{path.name} {path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            while window := file.read(WINDOW_BYTES):
                total.update(window)
                report(f"reading {path.name}, {file.tell() // 2**20} MiB")
    return total.digest()
