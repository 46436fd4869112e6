"""Rows that were seen, told by content: over grown, sorted and unchanged data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.data import DataConfig, FileSource, ReasoningGymSource
from storage.prompts.cursor import Cursor, draw
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource
from storage.runs.run_store import RunStore
from storage.runs.seen_rows import seen_at, seen_before, unseen, write_rows, write_seen


def source_of(path: Path, numbers: list[int]) -> PromptSource:
    path.write_text("".join(json.dumps({"question": str(n)}) + "\n" for n in numbers))
    return open_source(FileSource(path=str(path)))


def data(path: Path) -> DataConfig:
    return DataConfig(source=FileSource(path=str(path)), seed=3)


def test_of_data_that_grew_and_was_sorted_anew_only_new_rows_are_unseen(
    run: RunStore, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    first = source_of(path, [0, 1, 2, 3, 4])
    write_rows(run, first.row_digests())
    rows, cursor = draw(first, Cursor.start(data(path), first), 3)
    grown = source_of(path, [9, 4, 3, 2, 1, 0, 8])
    seen = seen_at(run, cursor, grown)
    assert seen is not None
    left = unseen(grown, seen)
    questions = {int(str(row["question"])) for row in grown.rows(left)}
    assert questions == {0, 1, 2, 3, 4, 8, 9} - set(rows)


def test_unseen_rows_come_first_and_then_all(run: RunStore, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    source = source_of(path, list(range(8)))
    fresh = [2, 5, 7]
    cursor = Cursor.start(data(path), source, len(fresh))
    assert cursor.remaining(1) == 3
    assert cursor.remaining(2) == 11
    first, cursor = draw(source, cursor, 2, fresh=fresh)
    assert Cursor.from_json(cursor.to_json()) == cursor
    assert set(cursor.drawn(fresh).tolist()) == set(first)
    more, cursor = draw(source, cursor, 9, fresh=fresh)
    assert sorted(first + more[:1]) == fresh
    assert sorted(more[1:]) == list(range(8))
    assert cursor.epoch == 2
    assert cursor.drawn().tolist() == list(range(8))


def test_a_chain_of_runs_remembers_what_all_have_seen(run: RunStore, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    source = source_of(path, list(range(6)))
    write_rows(run, source.row_digests())
    _, cursor = draw(source, Cursor.start(data(path), source), 4)
    seen = seen_at(run, cursor, source)
    assert seen is not None
    child = RunStore(run.store, "child")
    write_seen(child, seen)
    write_rows(child, source.row_digests())
    fresh = unseen(source, seen_before(child))
    assert len(fresh) == 2
    _, after = draw(source, Cursor.start(data(path), source, 2), 1, fresh=fresh)
    later = seen_at(child, after, source)
    assert later is not None
    assert len(unseen(source, later)) == 1


def test_a_run_that_kept_no_rows_is_known_only_while_the_data_are_the_same(
    run: RunStore, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    source = source_of(path, [0, 1, 2])
    _, cursor = draw(source, Cursor.start(data(path), source), 2)
    seen = seen_at(run, cursor, source)
    assert seen is not None and len(seen) == 2
    assert seen_at(run, cursor, source_of(path, [0, 1, 2, 3])) is None


def test_a_cursor_of_before_has_no_unseen_rows() -> None:
    record = {"epoch": 0, "position": 1, "seed": 0, "shuffle": True, "size": 3, "digest": "d"}
    assert Cursor.from_json(record).fresh == 0
    with pytest.raises(ValueError, match="unseen rows, not 0"):
        Cursor.from_json({**record, "fresh": 2}).drawn()


def test_more_problems_of_a_task_keep_their_digests() -> None:
    few = open_source(ReasoningGymSource(task="chain_sum", size=5)).row_digests()
    more = open_source(ReasoningGymSource(task="chain_sum", size=9)).row_digests()
    other = open_source(ReasoningGymSource(task="chain_sum", size=5, seed=1)).row_digests()
    assert more[:5].tolist() == few.tolist()
    assert not set(other) & set(more)
