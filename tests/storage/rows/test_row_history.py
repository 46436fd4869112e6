"""What is known of rows after draws: quarantine, readmission, order by difficulty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from configs.data import DataConfig, FileSource, QuarantineConfig
from storage.objects.store import Store
from storage.prompts.cursor import Cursor, NothingToDraw, draw
from storage.rows.readmissions import Readmission, ask, asked, between
from storage.rows.row_history import RowHistory, RowOutcomes, updated
from storage.runs.run_store import RunStore

nan = float("nan")


class Rows:
    """Ten rows."""

    digest = "d"

    def __len__(self) -> int:
        return 10


def cursor(order: str = "sequential") -> Cursor:
    config = DataConfig.model_validate({"source": FileSource(path="x.jsonl"), "order": order})
    return Cursor.start(config, Rows())


def outcomes(*lines: tuple[int, float], **columns: Any) -> RowOutcomes:
    """Groups of rows with a mean reward; nothing failed, and all of them vary."""
    rows, rewards = zip(*lines, strict=True)
    count = len(rows)
    given: dict[str, Any] = {
        "failed": [False] * count, "uniform": [False] * count, "tokens": [5.0] * count,
        "seconds": [nan] * count, **columns,
    }  # fmt: skip
    return RowOutcomes(
        row=np.array(rows), reward=np.array(rewards), **{k: np.array(v) for k, v in given.items()}
    )


def test_draws_of_a_row_are_counted_and_averaged() -> None:
    one = updated(RowHistory.empty(), outcomes((7, 0.25), (2, nan)), 1, None)
    two = updated(one, outcomes((7, 0.75), (4, 1.0)), 2, None)
    assert two.prompt_row.tolist() == [2, 4, 7]
    assert (two.draws.tolist(), two.scored.tolist()) == ([1, 1, 2], [0, 1, 2])
    ranks = two.ranks(10)
    assert ranks[[7, 4]].tolist() == [-0.5, -1.0]
    assert np.isneginf(np.delete(ranks, [4, 7])).all(), "row 2 was drawn, and never scored"
    assert one.draws.tolist() == [1, 1], "the earlier table stays as it was"


@pytest.mark.parametrize(
    ("bounds", "columns", "reason"),
    [
        ({"failures": 2}, {"failed": [True]}, "failures"),
        ({"no_variance": 2}, {"uniform": [True]}, "no_variance"),
        ({"tokens": 4.0}, {}, "tokens"),
        ({"seconds": 1.0}, {"seconds": [1.5]}, "seconds"),
    ],
)
def test_a_row_leaves_the_draw_at_its_bound(
    bounds: dict[str, float], columns: dict[str, Any], reason: str
) -> None:
    quarantine = QuarantineConfig.model_validate(bounds)
    history, entered = RowHistory.empty(), 0
    for step in (1, 2):
        history = updated(history, outcomes((3, 0.5), **columns), step, quarantine)
        entered = entered or step * bool(history.counts())
    assert history.counts() == {reason: 1}
    assert entered == history.since[0] == (2 if reason in ("failures", "no_variance") else 1)
    assert np.flatnonzero(history.kept_out(10)).tolist() == [3]


def test_only_draws_in_a_row_count() -> None:
    quarantine = QuarantineConfig(failures=2, no_variance=2)
    history = RowHistory.empty()
    for step, (failed, uniform) in enumerate(
        [(True, False), (False, True), (True, False), (False, True), (False, False)], 1
    ):
        columns = {"failed": [failed], "uniform": [uniform]}
        history = updated(history, outcomes((3, 0.5), **columns), step, quarantine)
        if step == 4:  # a failed draw says nothing about variance: two in a row
            assert history.counts() == {"no_variance": 1}


def test_a_row_that_is_let_in_begins_anew() -> None:
    quarantine = QuarantineConfig(failures=1)
    history = updated(
        RowHistory.empty(), outcomes((3, nan), (4, nan), failed=[True] * 2), 1, quarantine
    )
    assert np.flatnonzero(history.kept_out(10, {3})).tolist() == [4]
    assert not history.kept_out(10, None).any()
    history = updated(history, outcomes((5, 0.5)), 2, quarantine, {3})
    assert np.flatnonzero(history.kept_out(10)).tolist() == [4]
    assert history.failures.tolist() == [0, 1, 0]
    history = updated(history, outcomes((5, 0.5)), 3, quarantine, None)
    assert history.counts() == {}


def test_rows_in_quarantine_are_passed_over_and_counted() -> None:
    kept_out = np.zeros(10, bool)
    kept_out[[1, 2, 9]] = True
    rows, after = draw(Rows(), cursor(), 4, kept_out=kept_out)
    assert (rows, after.place) == ([0, 3, 4, 5], 6)
    rows, after = draw(Rows(), after, 4, kept_out=kept_out)
    assert (rows, after.place, after.epoch) == ([6, 7, 8, 0], 11, 1)
    assert 11 - 8 == 3, "rows that the draws passed over"
    rows, after = draw(Rows(), cursor(), 9, epochs=1, kept_out=kept_out)
    assert (rows, after.remaining(1)) == ([0, 3, 4, 5, 6, 7, 8], 0)
    with pytest.raises(NothingToDraw, match="All 10 rows of the data are in quarantine"):
        draw(Rows(), cursor(), 1, kept_out=np.ones(10, bool))


def test_an_epoch_comes_by_difficulty_and_the_next_by_what_is_known_then() -> None:
    first, second = np.full(10, -np.inf), np.arange(10) / -10.0
    first[[3, 8]] = -0.5, -0.9
    known = {0: first, 1: second}
    rows, after = draw(Rows(), cursor("difficulty"), 10, ranks=known.get)
    assert rows[-2:] == [8, 3], "unseen rows first, then the easier one"
    plain, _ = draw(Rows(), cursor("shuffled"), 10)
    assert rows[:-2] == [row for row in plain if row not in (3, 8)], "the unseen ones are shuffled"
    assert draw(Rows(), after, 3, ranks=known.get)[0] == [9, 8, 7]
    parts, place = [], cursor("difficulty")
    for _ in range(4):
        taken, place = draw(Rows(), place, 3, ranks=known.get)
        parts += taken
    assert parts == [*rows, 9, 8], "in several draws, across the epochs, it is the same"


def test_the_cursor_of_an_earlier_run_says_the_order_in_other_words() -> None:
    record = cursor("shuffled").to_json()
    old = {**{k: v for k, v in record.items() if k != "order"}, "shuffle": True}
    assert Cursor.from_json(old) == cursor("shuffled")
    assert Cursor.from_json({**old, "shuffle": False}) == cursor("sequential")
    with pytest.raises(ValueError, match="A data cursor's order is None"):
        Cursor.from_json({k: v for k, v in record.items() if k != "order"})


def test_requests_are_numbered_and_stay() -> None:
    run = RunStore(Store("memory://readmissions"), "r")
    assert (asked(run), between(run, 0, 0)) == (0, set())
    assert ask(run, Readmission(rows=[3, 4], by="x")) == 1
    assert ask(run, Readmission(rows=[9], by="x")) == 2
    assert between(run, 0, 2) == {3, 4, 9}
    assert between(run, 1, 2) == {9}
    assert ask(run, Readmission(rows=None, by="x")) == 3
    assert between(run, 2, 3) is None
    assert between(run, 3, 3) == set()
