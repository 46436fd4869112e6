"""Files of prompts as other programs write them: shards in folders, compressed, with Arrow's views."""

from __future__ import annotations

import base64
import gzip
import json
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.data import FileSource
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource

ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10)]
VIEWS = {
    pa.string_view(): ["1+1=", None, "x" * 40, ""],
    pa.list_view(pa.string_view()): [["a"], None, [], ["b", "c" * 30]],
    pa.large_list_view(pa.int64()): [[1], [2, 3], [], None],
    pa.struct([("role", pa.string_view())]): [{"role": "user"}, {"role": None}, None, {"role": ""}],
}
CHAT = pa.list_(pa.struct([("role", pa.string_view()), ("content", pa.string_view())]))


def opened(path: object) -> PromptSource:
    return open_source(FileSource(path=str(path)))


def lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


@pytest.mark.parametrize("kind", VIEWS, ids=str)
def test_parquet_with_views(kind: pa.DataType, tmp_path: Path) -> None:
    values = VIEWS[kind]
    table = pa.table({"n": [0, 1, 2, 3], "value": pa.array(values, kind)})
    pq.write_table(table, tmp_path / "v.parquet")
    assert pq.read_schema(tmp_path / "v.parquet").field("value").type == kind
    source = opened(tmp_path / "v.parquet")
    for order in ([0, 1, 2, 3], [3, 0, 2, 2, 1], [1], range(1, 4)):
        assert source.rows(order) == [{"n": i, "value": values[i]} for i in order]
    with pytest.raises(
        ValueError, match=f"Row {values.index(None)} of .* no value in column 'value'"
    ):
        source.check_columns(["value"])
    assert len(set(source.row_digests().tolist())) == 4


def test_chats_of_views(tmp_path: Path) -> None:
    """Arrow reads them and does not write them: another program's schema is put beside the data."""
    plain = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    chats = [[{"role": "user", "content": f"{i}?"}] * i for i in range(4)]
    schema = pa.schema([("prompt", CHAT)]).serialize().to_pybytes()
    with pq.ParquetWriter(
        tmp_path / "c.parquet", pa.schema([("prompt", plain)]), store_schema=False
    ) as file:
        file.write_table(pa.table({"prompt": pa.array(chats, plain)}))
        file.add_key_value_metadata({"ARROW:schema": base64.b64encode(schema).decode()})
    assert pq.read_schema(tmp_path / "c.parquet").field("prompt").type == CHAT
    assert opened(tmp_path / "c.parquet").rows([3, 1]) == [
        {"prompt": chats[3]},
        {"prompt": chats[1]},
    ]


@pytest.mark.parametrize("kind", [pa.binary(), pa.binary_view(), pa.large_binary()], ids=str)
def test_bytes_are_no_text_in_any_form(kind: pa.DataType, tmp_path: Path) -> None:
    pq.write_table(pa.table({"b": pa.array([b"x", b"y"], kind)}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="Row 1 of .* type bytes has no JSON form"):
        opened(tmp_path / "b.parquet").rows([1])


@pytest.mark.parametrize("lined", [".jsonl", ".ndjson", ".json"])
@pytest.mark.parametrize(
    ("end", "pack"),
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".zst", zstd),
        (".gz", lambda data: b"".join(map(gzip.compress, data.splitlines(keepends=True)))),
        (".zst", lambda data: b"".join(map(zstd, data.splitlines(keepends=True)))),
    ],
    ids=["plain", "gzip", "zstd", "gzip in parts", "zstd in parts"],
)
def test_compressed_lines(
    lined: str, end: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))
    file = tmp_path / f"data{lined}{end}"
    file.write_bytes(pack(lines(ROWS)))
    source = opened(file)
    assert source.rows([7, 0, 7]) == [ROWS[7], ROWS[0], ROWS[7]]
    assert source.rows(range(2, 9)) == ROWS[2:9]
    source.check_columns(["answer"])
    assert source.digest == opened(tmp_path / "rows.jsonl").digest, "of the rows, not of the form"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cut.jsonl.gz", gzip.compress(lines(ROWS))[:-9], "cannot be decompressed as gzip into"),
        ("cut.jsonl.zst", zstd(lines(ROWS))[:-3], "cannot be decompressed as zstd into"),
        ("plain.jsonl.gz", lines(ROWS), "cannot be decompressed as gzip into"),
        ("empty.jsonl.gz", gzip.compress(b"", mtime=0), "the file has no rows"),
        ("rows.jsonl.xz", b"", "only files of"),
        ("array.json", json.dumps(ROWS, indent=1).encode(), "Write one object per line"),
        ("array.json.gz", gzip.compress(json.dumps(ROWS).encode()), "Write one object per line"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        opened(tmp_path / name)
    assert name in str(refused.value) and "\n" not in str(refused.value)


def shards(place: str) -> None:
    """Ten rows in three files of each kind that can be read, beside what is no data."""
    parts = {"a.jsonl": ROWS[:3], "b.jsonl.gz": ROWS[3:4], "c.parquet": ROWS[4:]}
    for name, rows in parts.items():
        with fsspec.open(f"{place}/{name}", "wb") as stream:
            if name.endswith(".parquet"):
                pq.write_table(pa.Table.from_pylist(rows), stream)
            else:
                stream.write(gzip.compress(lines(rows)) if name.endswith(".gz") else lines(rows))
    for name in ("_SUCCESS", "README.md", ".hidden.jsonl", "deeper/d.jsonl"):
        with fsspec.open(f"{place}/{name}", "wb", auto_mkdir=True) as stream:
            stream.write(b"no rows")


@pytest.mark.parametrize("scheme", ["", "memory://"])
@pytest.mark.parametrize("asked", ["", "/", "/[abc].*"])
def test_shards_of_a_folder_are_one_source(scheme: str, asked: str, tmp_path: Path) -> None:
    place = f"{scheme}{tmp_path}" if not scheme else f"{scheme}{uuid.uuid4().hex}"
    shards(place)
    source = opened(place + asked)
    assert len(source) == 10 and source.columns == ("question", "answer")
    wanted = [9, 0, 3, 4, 3, 2]
    assert source.rows(wanted) == [ROWS[i] for i in wanted]
    assert source.rows(range(10)) == ROWS
    source.check_columns(["answer"])
    with pytest.raises(IndexError, match="no row 10"):
        source.rows([10])
    with pytest.raises(ValueError, match=r"Row 0 \(line 1\) of .*a\.jsonl has no column 'level'"):
        source.check_columns(["level"])


def test_a_pattern_takes_folders_within_and_a_new_file_changes_the_digest(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "rows.jsonl").write_bytes(lines(ROWS[number : number + 1]))
    with pytest.raises(ValueError, match=r"no file that can be read .* pattern, such as .*/\*\*/"):
        opened(tmp_path)
    pattern = f"{tmp_path}/**/*.jsonl"
    first = opened(pattern)
    assert first.rows(range(3)) == ROWS[:3]
    assert opened(pattern) is first
    (tmp_path / "0" / "rows.jsonl").write_bytes(lines(ROWS[5:6]))
    changed = opened(pattern)
    assert changed.rows([0]) == ROWS[5:6] and changed.digest != first.digest
    with pytest.raises(ValueError, match="there is no such file"):
        opened(f"{tmp_path}/*.jsonl")


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "rows[1].jsonl").write_bytes(lines(ROWS))
    (tmp_path / "rows1.jsonl").write_bytes(lines(ROWS[:1]))
    assert len(opened(tmp_path / "rows[1].jsonl")) == 10
