"""What Weights & Biases has written of a run without its server; its library does not read it back.

Its files are logs of LevelDB: after a header, blocks with records in parts, each a checksum, a length
and which part it is (https://github.com/google/leveldb/blob/main/doc/log_format.md).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 32768  # bytes
_PART = struct.Struct("<IHB")
WHOLE, LAST = 1, 4  # kinds of parts that end a record


def last_logged_step(folder: Path, run: str, project: str) -> int | None:
    """The last step of a run, by its id, among the offline runs in a folder; None of none."""
    last: int | None = None
    for file in folder.glob(f"offline-run-*-{run}/run-{run}.wandb"):
        records = [*records_of(file)]
        if not any(record.HasField("run") and record.run.project == project for record in records):
            continue
        for record in records:
            for item in record.history.item:
                if (item.key or "/".join(item.nested_key)) == "step":
                    last = max(last or 0, json.loads(item.value_json))
    return last


def records_of(file: Path) -> Iterator[Any]:
    """The whole records of a file, as Weights & Biases' own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), HEADER, b""
    while at + _PART.size <= len(data):
        room = BLOCK - at % BLOCK
        if room < _PART.size:
            at += room
            continue
        _, size, kind = _PART.unpack_from(data, at)
        at += _PART.size
        parts += data[at : at + size]
        at += size
        if kind in (WHOLE, LAST) and at <= len(data):
            yield Record.FromString(parts)
            parts = b""
