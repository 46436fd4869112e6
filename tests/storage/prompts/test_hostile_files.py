"""Files of a few kilobytes that ask for gigabytes: one sentence, within 2 GiB of address space."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.prompts import files
from storage.prompts.files import locate, open_file

CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from storage.prompts.files import locate, open_file
try:
    filesystem, paths = locate(sys.argv[1])
    source = open_file(filesystem, paths[0], "it")
    source.rows([0])
    source.check_columns(["a"])
except ValueError as error:
    print("refused:", error)
"""


def gzipped(path: Path, byte: bytes, mebibytes: int) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(mebibytes):
            file.write(byte * 2**20)


def zstd(path: Path, byte: bytes, mebibytes: int) -> None:
    with open(path, "wb") as raw, pa.CompressedOutputStream(raw, "zstd") as file:
        for _ in range(mebibytes):
            file.write(byte * 2**20)


def repeated(path: Path) -> None:
    """20,000 rows of one string of 1 MiB, 20 GiB in a file of some hundred bytes."""
    column = pa.DictionaryArray.from_arrays(np.zeros(20_000, np.int32), pa.array(["x" * 2**20]))
    pq.write_table(pa.table({"a": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 2000


def deep(path: Path) -> None:
    path.write_bytes(b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n")


def not_parquet(path: Path) -> None:
    path.write_bytes(b"PAR1" + b"\xff" * 1000 + (2**31 - 1).to_bytes(4, "little") + b"PAR1")


BOMBS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "gzip": ("a.jsonl.gz", lambda path: gzipped(path, b" ", 2048), "a line of more than 64 MiB"),
    "zstd": ("a.jsonl.zst", lambda path: zstd(path, b"\0", 2048), "a line of more than 64 MiB"),
    "parquet": ("a.parquet", repeated, "Row group 0 of it"),
    "nested": ("a.jsonl", deep, "too deep to be read"),
    "footer": ("a.parquet", not_parquet, "not a Parquet file"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_one_sentence(tmp_path: Path, name: str) -> None:
    file, make, said = BOMBS[name]
    make(tmp_path / file)
    command = [sys.executable, "-c", CHILD, str(tmp_path / file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("refused:"), done.stdout
    assert said in done.stdout
    assert done.stdout.count("\n") == 1


def test_a_group_that_is_larger_than_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_DECODED", 4 << 20)
    texts = [f"{number:1024}" for number in range(3000)]
    pq.write_table(pa.table({"a": texts, "b": [1] * 3000}), tmp_path / "a.parquet")
    assert opened(tmp_path / "a.parquet").rows([2999])[0]["b"] == 1
    pq.write_table(pa.table({"a": texts * 2}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"takes more than 0\.00391 GiB of memory"):
        opened(tmp_path / "b.parquet").rows([0])
    categories = pa.DictionaryArray.from_arrays(np.arange(3000) % 3000, pa.array(texts))
    pq.write_table(pa.table({"a": categories}), tmp_path / "c.parquet")
    assert opened(tmp_path / "c.parquet").rows([1])[0]["a"] == texts[1]


def test_text_that_the_disk_cannot_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops before the disk is full, whatever its lines are."""
    zstd(tmp_path / "a.jsonl.zst", b"\n", 16)
    monkeypatch.setattr(files, "_SPARED", 2**60)
    with pytest.raises(ValueError, match="No space left"):
        opened(tmp_path / "a.jsonl.zst")


def test_a_line_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_LINE", 100)
    line = '{"a": "' + "x" * 90 + '"}'
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    assert len(opened(tmp_path / "a.jsonl")) == 1
    (tmp_path / "b.jsonl").write_text(f"{line}\n{line}x\n")
    with pytest.raises(ValueError, match="with a line of more than"):
        opened(tmp_path / "b.jsonl")


def opened(path: Path) -> files.PromptSource:
    filesystem, paths = locate(str(path))
    return open_file(filesystem, paths[0], path.name)
