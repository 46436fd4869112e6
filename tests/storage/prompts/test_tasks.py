"""Several tasks as one source: shares by step, places of each task, rows seen."""

from __future__ import annotations

import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from configs.data import DataConfig
from storage.prompts.cursor import Cursor, NothingToDraw, TasksCursor
from storage.prompts.datasets import first_place, open_source
from storage.prompts.tasks import TaskRows, draw_tasks, in_turns, shared_out


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Tasks a, of 4 rows, and b, of 6, in one file that names them."""
    rows = [{"question": f"{n}", "task": "ba"[n % 5 < 2]} for n in range(10)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"b": {"weight": 2}, "a": {}}
    source = {"kind": "tasks", "source": {"kind": "file", "path": str(path)}, "tasks": tasks}
    return DataConfig.model_validate({"source": source, "template": "plain"})


def opened(data: DataConfig) -> tuple[TaskRows, TasksCursor]:
    source = open_source(data.source)
    assert isinstance(source, TaskRows)
    place = first_place(data, source)
    assert isinstance(place, TasksCursor)
    return source, place


def test_shares_are_exact_over_steps(data: DataConfig) -> None:
    _, place = opened(data)
    weights = {"a": Fraction(1), "b": Fraction(2)}
    counts = []
    for _ in range(6):
        found, place = shared_out(place, 4, weights)
        counts.append((found["a"], found["b"]))
    assert counts == [(1, 3), (2, 2), (1, 3)] * 2
    assert dict(place.owed) == {"a": "0", "b": "0"}


def test_whole_weights_are_numbers_of_each_step(data: DataConfig) -> None:
    _, place = opened(data)
    for _ in range(5):
        found, place = shared_out(place, 7, {"a": Fraction(3), "b": Fraction(4)})
        assert found == {"a": 3, "b": 4}


def test_any_weights_keep_within_two_prompts_of_their_share() -> None:
    chance = random.Random(7)
    for _ in range(40):
        names = [f"t{number}" for number in range(chance.randint(1, 12))]
        weights = {name: Fraction(chance.randint(1, 50), 10) for name in names}
        whole = Cursor(epoch=0, position=0, seed=0, order="shuffled", size=9, digest="x")
        place = TasksCursor(
            **whole.to_json(),  # type: ignore[arg-type]
            tasks=dict.fromkeys(names, whole),
            owed=dict.fromkeys(names, "0"),
        )
        total, drawn = Counter[str](), 0
        for _ in range(60):
            count = chance.randint(1, 9)
            found, place = shared_out(place, count, weights)
            assert sum(found.values()) == count and min(found.values()) >= 0
            total.update(found)
            drawn += count
            for name in names:
                share = drawn * weights[name] / sum(weights.values())
                assert abs(share - total[name]) < 2
                assert Fraction(place.owed[name]) == share - total[name]


def test_a_task_without_weight_gets_nothing(data: DataConfig) -> None:
    _, place = opened(data)
    _, place = shared_out(place, 1, {"a": Fraction(1), "b": Fraction(1)})
    for _ in range(4):
        found, place = shared_out(place, 3, {"a": Fraction(1), "b": Fraction(0)})
        assert found == {"a": 3, "b": 0}


def test_prompts_of_tasks_take_turns() -> None:
    assert in_turns({"a": 1, "b": 3}) == ["b", "a", "b", "b"]
    assert in_turns({"a": 2, "b": 2}) == ["a", "b", "a", "b"]
    assert in_turns({"a": 0, "b": 1}) == ["b"]


def test_each_task_has_epochs_of_its_own(data: DataConfig) -> None:
    source, place = opened(data)
    assert [row["task"] for row in source.rows(range(10))] == ["a"] * 4 + ["b"] * 6
    drawn: list[int] = []
    for _ in range(6):
        rows, place = draw_tasks(source, place, {"a": 2, "b": 1})
        drawn += rows
    assert Counter(drawn) == {**dict.fromkeys(range(4), 3), **dict.fromkeys(range(4, 10), 1)}
    assert (place.place, place.tasks["a"].epoch, place.tasks["b"].epoch) == (18, 3, 1)
    assert (place.epoch, place.position) == (1, 8)
    assert Cursor.from_json(json.loads(json.dumps(place.to_json()))) == place


def test_draws_do_not_depend_on_how_they_are_cut(data: DataConfig) -> None:
    source, place = opened(data)
    once, _ = draw_tasks(source, place, {"a": 6, "b": 9})
    parts = []
    for _ in range(3):
        rows, place = draw_tasks(source, place, {"a": 2, "b": 3})
        parts += rows
    for own in source.ranges.values():
        assert [row for row in once if row in own] == [row for row in parts if row in own]


def test_rows_seen_are_of_their_task(data: DataConfig) -> None:
    source, place = opened(data)
    rows, place = draw_tasks(source, place, {"a": 3, "b": 2})
    assert set(place.drawn().tolist()) == set(rows)
    fresh = [row for row in range(10) if row not in rows]
    later = first_place(data, source, fresh)
    assert isinstance(later, TasksCursor) and later.in_unseen
    more, later = draw_tasks(source, later, {"a": 1, "b": 4}, fresh)
    assert set(more) == set(fresh), "those that nobody has seen come first"
    assert later.place == 5 and not later.in_unseen


def test_equal_rows_of_two_tasks_are_two_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1"}\n')
    one = {"source": {"kind": "file", "path": str(path)}}
    source = {"kind": "tasks", "tasks": {"a": one, "b": one}}
    found = open_source(DataConfig.model_validate({"source": source}).source)
    digests = found.row_digests()
    assert len(set(digests.tolist())) == 2
    assert found.row_digests(range(1, 2)).tolist() == digests[1:].tolist()


def test_a_task_all_of_whose_rows_are_out_is_named(data: DataConfig) -> None:
    source, place = opened(data)
    out = np.zeros(10, bool)
    out[:4] = True
    rows, _ = draw_tasks(source, place, {"b": 6}, kept_out=out)
    assert sorted(rows) == list(range(4, 10))
    with pytest.raises(NothingToDraw, match="All 4 rows of the task a are in quarantine"):
        draw_tasks(source, place, {"a": 1}, kept_out=out)


def test_other_rows_are_refused(data: DataConfig) -> None:
    source, place = opened(data)
    tasks = {**source.parts, "c": source.parts["a"]}
    with pytest.raises(ValueError, match="The data has changed since this order began"):
        draw_tasks(TaskRows(tasks), place, {"a": 1})


def test_a_damaged_record_is_told() -> None:
    with pytest.raises(ValueError, match="what is owed them"):
        Cursor.from_json({"tasks": {"a": {}}, "owed": {}})


def test_each_task_is_drawn_from_its_easiest_row_on(data: DataConfig) -> None:
    source, place = opened(data.model_copy(update={"order": "difficulty"}))
    ranks = np.array([3, 1, 0, 2, 5, 0, 4, 1, 2, 3], float)  # of a: rows 0 to 3; of b: 4 to 9
    asked: list[tuple[int, str]] = []

    def by_mean_reward(epoch: int, task: str = "") -> np.ndarray | None:
        asked.append((epoch, task))
        return ranks if task == "b" else None

    rows, after = draw_tasks(source, place, {"a": 4, "b": 6}, ranks=by_mean_reward)
    assert [row for row in rows if row >= 4] == [5, 7, 8, 9, 6, 4]
    plain, _ = draw_tasks(*opened(data), {"a": 4, "b": 6})
    assert [row for row in rows if row < 4] == [row for row in plain if row < 4], "not measured"
    assert set(asked) == {(0, "a"), (0, "b")}
    assert [one.epoch for one in after.tasks.values()] == [1, 1]
