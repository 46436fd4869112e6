"""Sources of prompts, and the order in which their rows are drawn."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.data import DataConfig, FileSource, FunctionSource, HubSource, ReasoningGymSource
from storage.objects.documents import pack, unpack
from storage.prompts import functions
from storage.prompts.cursor import Cursor, Exhausted, draw, epoch_order
from storage.prompts.datasets import ReasoningGymRows, arrow_digest, open_source
from storage.prompts.functions import FunctionRows

ROWS = [
    {"question": f"What is {i} + {i}?", "answer": str(2 * i), "level": i % 3} for i in range(25)
]


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    return str(path)


@pytest.fixture(params=["jsonl", "parquet"])
def file(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


# Files


def test_a_file_gives_the_rows_asked_for(file: str) -> None:
    source = open_source(FileSource(path=file))
    assert len(source) == 25
    assert source.columns == ("question", "answer", "level")
    wanted = [24, 0, 13, 13, 6, 7]
    assert source.rows(wanted) == [ROWS[i] for i in wanted]
    assert source.rows([]) == []
    with pytest.raises(IndexError, match="no row 25"):
        source.rows([25])
    with pytest.raises(IndexError):
        source.rows([-1])


def test_the_digest_is_that_of_the_bytes(file: str) -> None:
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert open_source(FileSource(path=file)).digest == f"sha256:{digest}"


def test_a_source_is_opened_once_until_its_file_changes(jsonl: str) -> None:
    first = open_source(FileSource(path=jsonl))
    assert open_source(FileSource(path=jsonl)) is first
    write_jsonl(Path(jsonl), [*ROWS, {"question": "new", "answer": "row"}])
    assert len(open_source(FileSource(path=jsonl))) == 26


def test_a_file_is_read_at_any_fsspec_address() -> None:
    with fsspec.open("memory://prompts/rows.jsonl", "wb") as stream:
        stream.write(b'{"question": "a"}\n{"question": "b"}')
    source = open_source(FileSource(path="memory://prompts/rows.jsonl"))
    assert source.rows([1, 0]) == [{"question": "b"}, {"question": "a"}]


def test_blank_lines_and_text_beyond_ascii(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "é"}\n\n  \n{"q": "日本"}\r\n\n', encoding="utf-8")
    assert open_source(FileSource(path=str(path))).rows([0, 1]) == [{"q": "é"}, {"q": "日本"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": ', "Row 2 (line 4)"),
        ("[1, 2]", "Row 2 (line 4)"),
        ('{"answer": "4"}', "Row 2 (line 4) of .* has no column 'question'"),
        ('{"question": null}', "Row 2 (line 4) of .* has no value in column 'question'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"question": "1"}}\n\n{{"question": "2"}}\n{line}\n{{"question": "3"}}\n')
    source = open_source(FileSource(path=str(path)))
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        source.check_columns(["question"])


def test_parquet_names_the_row_without_a_value(tmp_path: Path) -> None:
    rows = [{"q": str(i), "a": None if i == 9 else "x"} for i in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=5)
    source = open_source(FileSource(path=str(tmp_path / "rows.parquet")))
    source.check_columns(["q"])
    with pytest.raises(ValueError, match="Row 9 .* no value in column 'a'"):
        source.check_columns(["q", "a"])
    with pytest.raises(ValueError, match="no column 'b'; its columns are: a, q"):
        source.check_columns(["b"])


def test_parquet_keeps_dates_as_text_and_refuses_bytes(tmp_path: Path) -> None:
    from datetime import date

    rows = [{"q": "when", "day": date(2025, 1, 2)}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert open_source(FileSource(path=str(tmp_path / "a.parquet"))).rows([0]) == [
        {"q": "when", "day": "2025-01-02"}
    ]
    pq.write_table(pa.Table.from_pylist([{"image": b"\xff"}]), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="Row 0 of .* type bytes has no JSON form"):
        open_source(FileSource(path=str(tmp_path / "b.parquet"))).rows([0])


def test_unusable_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "fake.parquet").write_text("no")
    for name, said in (
        ("absent.jsonl", "there is no such file"),
        ("empty.jsonl", "the file has no rows"),
        ("rows.csv", "only files of .parquet, .jsonl, .ndjson, .json, .jsonl.gz, "),
        ("fake.parquet", "not a Parquet file"),
    ):
        with pytest.raises(ValueError, match=said):
            open_source(FileSource(path=str(tmp_path / name)))
    with pytest.raises(ValueError, match="cannot be opened"):
        open_source(FileSource(path="nosuch://place/rows.jsonl"))


def test_digests_of_rows_are_those_of_before_however_they_are_read(tmp_path: Path) -> None:
    """Runs keep them: a row has the same digest in every version and format."""
    rows = [{"question": f"{n}?", "answer": n, "tags": ["a", None]} for n in range(1100)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n \n".join(lines) + "\n\n")
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    known = [
        xxhash.xxh3_64_intdigest(json.dumps(row, sort_keys=True, separators=(",", ":")).encode())
        for row in rows
    ]
    for name in ("rows.jsonl", "rows.parquet"):
        source = open_source(FileSource(path=str(tmp_path / name)))
        assert source.row_digests().tolist() == known
        assert source.row_digests(range(511, 1030)).tolist() == known[511:1030]
        assert source.row_digests(range(3, 3)).tolist() == []
        assert source.row_digests() is source.row_digests()  # made once


# Hub


def test_the_hub_without_its_library_says_what_to_install() -> None:
    if importlib.util.find_spec("datasets"):
        pytest.skip("the datasets library is installed")
    with pytest.raises(ValueError, match="Install it: pip install 'datasets>=4'"):
        open_source(HubSource(name="openai/gsm8k", subset="main"))


def test_hub_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    source = open_source(HubSource(name=str(tmp_path)))
    assert source.rows([3, 1]) == [ROWS[3], ROWS[1]]
    assert len(source) == 25
    assert source.digest.startswith("arrow-sha256:")
    source.check_columns(["question"])
    # A run of version 0.1 recorded a digest over rows as JSON.
    rows = b"".join(json.dumps(row, sort_keys=True).encode() for row in ROWS)
    columns = json.dumps(list(ROWS[0])).encode()
    recorded = f"sha256:{hashlib.sha256(columns + rows).hexdigest()}"
    old = source.as_recorded(recorded)
    assert old.digest == recorded
    assert old.rows([3]) == [ROWS[3]]
    assert source.as_recorded(source.digest) is source
    cursor = Cursor.start(DataConfig(source=HubSource(name=str(tmp_path))), old)
    assert len(draw(old, cursor, 3)[0]) == 3
    with pytest.raises(ValueError, match="The data has changed"):
        draw(source, cursor, 3)
    with pytest.raises(ValueError, match="no column 'b'"):
        source.check_columns(["b"])
    with pytest.raises(ValueError, match="cannot be loaded"):
        open_source(HubSource(name=str(tmp_path), split="dev"))


def test_an_arrow_digest_is_of_the_values_and_not_of_their_place_in_memory() -> None:
    rows: dict[str, list] = {
        "question": [f"what is {i}" if i % 3 else None for i in range(20)],
        "turns": [[{"role": "user", "content": str(i)}] * (i % 4) for i in range(20)],
        "level": list(range(20)),
    }
    table = pa.table(rows)

    def of(table: pa.Table, size: int = 8) -> str:
        return arrow_digest(table.slice(start, size) for start in range(0, len(table), size))

    pieces = [table.slice(0, 3), table.slice(3, 9), table.slice(12)]
    padded = pa.concat_tables([table.slice(5, 2), table, table.slice(1, 4)])
    assert of(table) == of(pa.concat_tables(pieces)) == of(padded.slice(2, 20))
    for name in rows:  # another value, another order, another name, another type
        changed = {**rows, name: [rows[name][1], *rows[name][1:]]}
        assert of(pa.table(changed, schema=table.schema)) != of(table)
    assert of(table.take(list(range(19, -1, -1)))) != of(table)
    assert of(table.rename_columns(["prompt", "turns", "level"])) != of(table)
    narrow = table.set_column(2, "level", table["level"].cast(pa.int32()))
    assert of(narrow) != of(table)


# reasoning-gym


def gym(task: str = "chain_sum", **params: int) -> ReasoningGymSource:
    return ReasoningGymSource(task=task, size=40, seed=7, params=params)


def test_reasoning_gym_makes_the_same_rows_again() -> None:
    source = open_source(gym(min_terms=2, max_terms=2))
    assert len(source) == 40
    source.check_columns(["question", "answer"])
    [row, again] = source.rows([5, 5])
    assert row == again
    assert set(row) == {"question", "answer", "metadata"}
    assert json.dumps(row)
    assert unpack(str(row["metadata"]))["difficulty"]["num_terms"] == (2, 2)
    assert source.digest != open_source(gym(min_terms=2, max_terms=3)).digest


def test_reasoning_gym_refuses_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="close to it are chain_sum"):
        open_source(gym("chain_sums")).rows([0])
    with pytest.raises(ValueError, match="refuses: .*unexpected keyword argument 'terms'"):
        open_source(gym(terms=2)).rows([0])
    with pytest.raises(ValueError, match="refuses: max_terms must be >= min_terms"):
        open_source(gym(min_terms=3, max_terms=2)).rows([0])
    with pytest.raises(ValueError, match="no column 'solution'"):
        open_source(gym()).check_columns(["solution"])


@pytest.mark.parametrize("task", ["arc_agi", "rearc", "graph_color", "knights_knaves", "countdown"])
def test_scorers_judge_a_stored_row_as_the_fresh_one(task: str) -> None:
    """Plain JSON turns tuples into lists, and arc_agi then gives a right answer 0.05."""
    source = ReasoningGymRows(gym(task))
    problem = source.problems[0]
    [row] = source.rows([0])
    entry = {**row, "metadata": unpack(json.loads(json.dumps(row["metadata"])))}
    fresh = source.problems.score_answer(problem["answer"], problem)
    assert source.problems.score_answer(row["answer"], entry) == fresh


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$tuple") | st.integers(), inner)
        | st.frozensets(st.integers() | st.tuples(st.text(), st.integers())).map(set)
    ),
    max_leaves=12,
)


@given(json_like)
def test_packed_values_come_back_equal_and_of_the_same_types(value: object) -> None:
    back = unpack(pack(value))
    assert back == value
    assert repr(type(back)) == repr(type(value))


# Order


class Counted:
    """A source of which only the size is looked at."""

    def __init__(self, size: int, digest: str = "sha256:0") -> None:
        self.size = size
        self.digest = digest

    def __len__(self) -> int:
        return self.size


def start(size: int, shuffle: bool = True, seed: int = 0) -> tuple[Counted, Cursor]:
    source = Counted(size)
    config = DataConfig(
        source=FileSource(path="x.jsonl"),
        order="shuffled" if shuffle else "sequential",
        seed=seed,
    )
    return source, Cursor.start(config, source)


@settings(max_examples=60)
@given(
    size=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    cut=st.integers(0, 12),
)
def test_every_row_once_per_epoch_and_resuming_changes_nothing(
    size: int, sizes: list[int], seed: int, shuffle: bool, cut: int
) -> None:
    source, cursor = start(size, shuffle, seed)
    drawn: list[int] = []
    for number, n in enumerate(sizes):
        if number == cut:  # the run dies, and goes on from the commit's JSON
            cursor = Cursor.from_json(json.loads(json.dumps(cursor.to_json())))
            epoch_order.cache_clear()
        rows, cursor = draw(source, cursor, n)
        assert len(rows) == n
        drawn += rows
    for begin in range(0, len(drawn) - size + 1, size):
        assert sorted(drawn[begin : begin + size]) == list(range(size))
    assert cursor.epoch * size + cursor.position == len(drawn)
    # However it is cut into draws, the sequence is the same.
    source, whole = start(size, shuffle, seed)
    assert draw(source, whole, len(drawn))[0] == drawn


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    source, cursor = start(50, shuffle=False)
    assert draw(source, cursor, 60)[0] == [*range(50), *range(10)]


def test_the_order_is_fixed_for_good() -> None:
    """These numbers must never change: a resumed run relies on them."""
    assert epoch_order(10, 42, 0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]


def test_the_first_row_is_fair() -> None:
    firsts = Counter(int(epoch_order(5, 1, epoch)[0]) for epoch in range(2000))
    assert max(abs(count - 400) for count in firsts.values()) < 80


def test_epochs_end() -> None:
    source, cursor = start(10)
    first, cursor = draw(source, cursor, 8, epochs=2)
    assert cursor.remaining(2) == 12
    second, cursor = draw(source, cursor, 8, epochs=2)
    last, cursor = draw(source, cursor, 8, epochs=2)
    assert len(last) == 4
    assert Counter(first + second + last) == Counter(dict.fromkeys(range(10), 2))
    with pytest.raises(Exhausted, match="All 2 epochs of 10 rows"):
        draw(source, cursor, 1, epochs=2)
    assert len(draw(source, cursor, 3, epochs=3)[0]) == 3  # the settings now allow more


def test_changed_data_and_broken_cursors_are_refused() -> None:
    _, cursor = start(10)
    with pytest.raises(ValueError, match="The data has changed"):
        draw(Counted(11), cursor, 1)
    with pytest.raises(ValueError, match="The data has changed"):
        draw(Counted(10, "sha256:1"), cursor, 1)
    with pytest.raises(ValueError, match="cursor's epoch is '1', where int is expected"):
        Cursor.from_json({**cursor.to_json(), "epoch": "1"})
    with pytest.raises(ValueError, match="cursor's digest is None"):
        Cursor.from_json({k: v for k, v in cursor.to_json().items() if k != "digest"})


def test_an_order_is_not_writable() -> None:
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(4, 0, 0)[:] = np.arange(4)


def test_importing_loads_no_data_library() -> None:
    program = (
        "import sys, storage.prompts.datasets, storage.prompts.cursor, storage.tracking.tracker, storage.tracking.plots, "
        "engines.rewards.runner, engines.data.chat_template; "
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'datasets', 'reasoning_gym', "
        "'mlflow', 'matplotlib', 'sympy') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stdout.strip() == "[]"


# Functions of a user's


ROWS_FILE = """
import torch_free_neighbour

def rows(size, hard=False):
    for i in range(size):
        yield {"question": f"{i}?", "answer": i if i % 2 else None, "hard": hard}

def listed():
    return [{"question": "a", "at": torch_free_neighbour.AT}]

def numbers():
    return [1, 2]

def none():
    return []

def fails():
    return [1 / 0]

def raw():
    return [{"question": b"a"}]
"""


@pytest.fixture
def rows_file(tmp_path: Path) -> str:
    (tmp_path / "torch_free_neighbour.py").write_text(
        "import datetime\nAT = datetime.date(2026, 1, 2)"
    )
    (tmp_path / "own_rows.py").write_text(ROWS_FILE)
    return str(tmp_path / "own_rows.py")


def test_a_function_gives_the_rows_asked_for(rows_file: str) -> None:
    source = open_source(FunctionSource(path=f"{rows_file}:rows", params={"size": 5}))
    assert (len(source), source.columns) == (5, ("question", "answer", "hard"))
    assert [row["question"] for row in source.rows([4, 0, 0])] == ["4?", "0?", "0?"]
    with pytest.raises(IndexError, match="no row 5"):
        source.rows([5])
    source.check_columns(["question"])
    with pytest.raises(ValueError, match="Row 0 of .*rows has no value in column 'answer'"):
        source.check_columns(["answer"])
    with pytest.raises(ValueError, match="Row 0 .* has no column 'level'"):
        source.check_columns(["level"])
    dated = open_source(FunctionSource(path=f"{rows_file}:listed"))
    assert dated.rows([0]) == [{"question": "a", "at": "2026-01-02"}]


def test_the_digest_of_a_function_is_that_of_its_rows(rows_file: str) -> None:
    def made(**params: int | bool) -> FunctionRows:
        return FunctionRows(FunctionSource(path=f"{rows_file}:rows", params=params))

    first, same = made(size=5), made(size=5)
    assert first.digest == same.digest
    assert len({first.digest, made(size=6).digest, made(size=5, hard=True).digest}) == 3
    assert np.array_equal(first.row_digests(), made(size=6).row_digests()[:5])
    _, cursor = draw(first, Cursor.start(DataConfig(source=FunctionSource(path="x:y")), first), 2)
    with pytest.raises(ValueError, match="The data has changed since this order began: 5 rows"):
        draw(made(size=5, hard=True), cursor, 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("numbers", "Row 0 of .*numbers is a int, not a dict of columns"),
        ("none", "it returned no rows"),
        ("fails", r"gave no rows: ZeroDivisionError: division by zero \(own_rows.py:18\)"),
        ("rows", "gave no rows: TypeError: .* missing 1 required positional argument: 'size'"),
        (
            "raw",
            "Row 0 of .*raw cannot be kept as JSON: a value of type bytes has no JSON form, in the column '",
        ),
        ("absent", "data.source.path: file '.*own_rows.py' has no 'absent'"),
    ],
)
def test_what_is_no_source_is_one_sentence(rows_file: str, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refusal:
        open_source(FunctionSource(path=f"{rows_file}:{name}"))
    assert "\n" not in str(refusal.value)


ENDLESS = """
import itertools, time
def counts(): return ({"question": str(n)} for n in itertools.count())
def waits():
    yield {"question": "1"}
    time.sleep(600)
def sleeps(): time.sleep(600)
def slow():
    while True: yield {"question": "1"}; time.sleep(0.05)
def times_out(): raise TimeoutError("mine")
def ends(): return [{"question": "1"}]
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("counts", "no end of them within 0.5 s and 1000 rows. Let it end, or set"),
        ("waits", "no end of them within 0.5 s"),
        ("sleeps", "no end of them within 0.5 s"),
        ("slow", "no end of them within 0.5 s"),
        ("times_out", "which gave no rows: TimeoutError: mine"),
    ],
)
def test_a_function_without_end_is_one_sentence(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "MOST_ROWS", 1000)
    monkeypatch.setattr(functions, "_SECOND", 0.1)
    (tmp_path / "endless.py").write_text(ENDLESS)
    source = FunctionSource(path=f"{tmp_path}/endless.py:{name}", timeout=0.5)
    began = time.monotonic()
    with pytest.raises(ValueError) as error:
        FunctionRows(source)
    assert said in str(error.value) and time.monotonic() - began < 10
    assert len(FunctionRows(FunctionSource(path=f"{tmp_path}/endless.py:ends"))) == 1


def test_a_column_may_begin_in_a_later_row(tmp_path: Path) -> None:
    rows = [{"question": "a"}, {"question": "b", "hint": None}, {"question": "c", "level": 2}]
    path = write_jsonl(tmp_path / "later.jsonl", rows)
    (tmp_path / "later.py").write_text(f"def rows():\n    return {rows!r}\n")
    chosen = FileSource(path=path, where={"level": 2})
    for source in (
        open_source(FileSource(path=path)),
        open_source(FunctionSource(path=f"{tmp_path}/later.py:rows")),
        open_source(chosen),
    ):
        assert source.has_column("question") and source.has_column("hint")
        assert source.has_column("level") and not source.has_column("answer")
    assert open_source(chosen).rows([0]) == [rows[2]], "rows are chosen by it too"
    with pytest.raises(ValueError, match="has no column 'nowhere'"):
        open_source(FileSource(path=path, where={"nowhere": 2}))


def test_rows_nested_too_deep_are_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "deep.jsonl"
    file.write_text('{"question": "1", "m": ' + "[" * 50_000 + "]" * 50_000 + "}\n")
    with pytest.raises(
        ValueError, match=r"Row 0 \(line 1\) .*within each other too deep"
    ) as refusal:
        open_source(FileSource(path=str(file))).rows([0])
    assert "\n" not in str(refusal.value)
