"""Rows with NaN and infinity: kept as they are, told apart, and counted as equal to themselves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.data import DataConfig, FileSource, FunctionSource
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.prompts.cursor import Cursor, draw
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource

NAN, INF = math.nan, math.inf
VALUES: list[Any] = [
    {"x": NAN},
    {"x": INF},
    {"x": -INF},
    {"x": 1.0},
    {"x": None},
    {"x": NAN, "y": [0.5, NAN]},
]
ROWS = [{"question": "1+1=", "info": value} for value in VALUES]


def sources(folder: Path) -> dict[str, PromptSource]:
    """The same rows from each kind of source."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    kind = pa.struct([("x", pa.float64()), ("y", pa.list_(pa.float64()))])
    table = pa.table(
        {"question": [row["question"] for row in ROWS], "info": pa.array(VALUES, kind)}
    )
    pq.write_table(table, folder / "rows.parquet")
    (folder / "own.py").write_text(
        f"import json\ndef rows():\n    return [json.loads(r) for r in {[json.dumps(r) for r in ROWS]!r}]\n"
    )
    return {
        "jsonl": open_source(FileSource(path=str(folder / "rows.jsonl"))),
        "parquet": open_source(FileSource(path=str(folder / "rows.parquet"))),
        "function": open_source(FunctionSource(path=f"{folder}/own.py:rows")),
    }


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "function"])
def test_each_row_has_a_digest_of_its_own(tmp_path: Path, kind: str) -> None:
    source = sources(tmp_path)[kind]
    digests = source.row_digests().tolist()
    assert len(set(digests)) == len(ROWS)
    assert sources(tmp_path)[kind].row_digests().tolist() == digests, "NaN is the same NaN again"
    assert source.row_digests(range(1, 3)).tolist() == digests[1:3]
    _, cursor = draw(source, Cursor.start(DataConfig(source=FunctionSource(path="x:y")), source), 2)
    assert cursor.digest == source.digest


def test_text_and_null_are_other_rows(tmp_path: Path) -> None:
    lines = ['{"x": NaN}', '{"x": "NaN"}', '{"x": null}', '{"x": Infinity}', '{"x": "Infinity"}']
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, '{"x": 1e999}']))
    digests = open_source(FileSource(path=str(tmp_path / "rows.jsonl"))).row_digests().tolist()
    assert len(set(digests)) == 5
    assert digests[3] == digests[5], "a number that no float holds is read as infinity"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "function"])
def test_a_stored_row_is_read_as_it_was(tmp_path: Path, kind: str) -> None:
    store = Store(f"file://{tmp_path}/store")
    rows = sources(tmp_path)[kind].rows(range(len(ROWS)))
    ref = write_batch(store, "prompts.safetensors", {"row": rows})
    # repr, since NaN is not equal to itself
    assert repr(ref.fetch_list(store, "row")) == repr(rows)
    infos = [row["info"] for row in ref.fetch_list(store, "row")]
    assert math.isnan(infos[0]["x"]) and infos[1]["x"] == INF and infos[2]["x"] == -INF
    assert infos[5]["y"][0] == 0.5 and math.isnan(infos[5]["y"][1])
