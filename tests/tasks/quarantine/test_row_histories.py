"""What the draw of a step goes by: committed work alone, whatever else is under way."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.prompts.cursor import Cursor, TasksCursor
from storage.rows.readmissions import Readmission, ask
from storage.rows.row_history import RowHistory, RowOutcomes, updated
from storage.runs.run_store import RunStore
from tasks.quarantine import row_histories
from tasks.quarantine.feature import FEATURE
from tasks.quarantine.row_histories import RowHistories
from tasks.run.clock import KnownRows, RowTracker
from tasks.run.features import features_of

SIZE = 6


def table(files: RunStore, step: int) -> BatchRef:
    """After `step` the rows below it are in quarantine, and all were drawn, easier ones later."""
    found = RowHistory.empty()
    for row in range(SIZE):
        lost = RowOutcomes(
            row=np.array([row]), reward=np.array([row / 10 + step]), failed=np.array([row < step]),
            uniform=np.array([False]), tokens=np.array([1.0]), seconds=np.array([np.nan]),
        )  # fmt: skip
        found = updated(found, lost, step, config().data.quarantine)
    return write_batch(files.store, f"{files.run}/{step}.safetensors", found.columns())


def config(*words: str) -> GRPOConfig:
    given = ["data.quarantine.failures=1", "data.order=difficulty", *words]
    return load_recipe(GRPOConfig, "tiny", given)


def cursor(epoch: int, position: int = 0) -> Cursor:
    return Cursor(epoch=epoch, position=position, seed=0, order="difficulty", size=SIZE, digest="d")


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> RunStore:
    return RunStore(Store(f"memory://histories-{request.node.name}"), "r")


class Steps:
    """Commits of a run, made one by one, and what a flow that begins after one of them knows."""

    def __init__(self, files: RunStore, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
        self.files, self.config = files, config(*words)
        self.commits: dict[int, Any] = {}
        monkeypatch.setattr(row_histories, "read_outline", lambda _, step: self.commits[step])

    def known(self, head: int, at: Cursor | None = None) -> RowHistories:
        opened: Any = SimpleNamespace(config=self.config, files=self.files, origin=None, start=0)
        last, place = self.commits.get(head), at or cursor(0)
        return RowHistories(opened, cast(Any, SimpleNamespace(head=head, last=last, cursor=place)))

    def commit(self, rows: RowHistories, step: int, at: Cursor, seen: int = 0) -> None:
        refs = rows.named(step, table(self.files, step))
        made: Any = SimpleNamespace(step=step, refs=refs, readmissions=seen, cursor=at.to_json())
        self.commits[step] = made
        rows.committed(made)


def kept_out(rows: RowHistories, step: int) -> list[int]:
    found = rows.for_draw(step).kept_out
    return [] if found is None else np.flatnonzero(found).tolist()


OVERLAP = ("max_staleness=2", "algorithm.correction=[{kind: truncate}]")


@pytest.mark.parametrize(("words", "lag"), [((), 0), (OVERLAP, 2)])
def test_a_resumed_run_draws_by_what_an_uninterrupted_one_does(
    files: RunStore, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], lag: int
) -> None:
    steps = Steps(files, monkeypatch, *words)
    rows = steps.known(0)
    for step in range(1, 6):
        rows.has_drawn(step, cursor(0, 1))
        steps.commit(rows, step, cursor(0, 1))
        resumed = steps.known(step)
        for ahead in range(step + 1, step + 2 + lag):  # the steps that may draw by now
            for known in (resumed, rows):
                assert kept_out(known, ahead) == list(range(max(0, ahead - 1 - lag)))
                known.has_drawn(ahead, cursor(0, 1))


def test_an_epochs_order_is_of_when_it_began(
    files: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(files, monkeypatch)
    rows = steps.known(0)
    assert rows.for_draw(1).ranks(0) is None, "nothing is known yet"
    rows.has_drawn(1, cursor(0, 4))
    steps.commit(rows, 1, cursor(0, 4))
    assert rows.for_draw(2).ranks(0) is None, "the first epoch keeps its order"
    next_epoch = rows.for_draw(2).ranks(1)
    assert next_epoch is not None and next_epoch[3] == pytest.approx(-1.3)
    rows.has_drawn(2, cursor(1, 2))
    steps.commit(rows, 2, cursor(1, 2))
    for known in (rows, steps.known(2, cursor(1, 2))):
        ranks = known.for_draw(3).ranks(1)
        assert ranks is not None and ranks.tolist() == next_epoch.tolist()
        later = known.for_draw(3).ranks(2)
        assert later is not None and later[3] == pytest.approx(-2.3)


def test_requests_count_from_the_next_draw_and_once(
    files: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(files, monkeypatch)
    rows = steps.known(0)
    for step in (1, 2):
        rows.has_drawn(step, cursor(0, 1))
        steps.commit(rows, step, cursor(0, 1))
    assert kept_out(rows, 3) == [0, 1]
    ask(files, Readmission(rows=[1], by="x"))
    assert (kept_out(rows, 3), rows.for_draw(3).readmissions) == ([0], 1)
    assert rows.readmitted(3, 1) == {1}
    rows.has_drawn(3, cursor(0, 1))
    steps.commit(rows, 3, cursor(0, 1), seen=1)  # whose table has its own say on row 1
    assert kept_out(rows, 4) == kept_out(steps.known(3), 4) == [0, 1, 2]
    assert rows.readmitted(4, 1) == set()


def test_only_runs_whose_draws_go_by_rows_use_it() -> None:
    for words in (["data.quarantine.failures=1"], ["data.order=difficulty"]):
        assert features_of(load_recipe(GRPOConfig, "tiny", words)) == [FEATURE]
    assert features_of(load_recipe(GRPOConfig, "tiny")) == []
    assert RowTracker().for_draw(1) == KnownRows()


def test_an_epoch_that_begins_with_a_step_goes_by_what_that_step_knows(
    files: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before drew the last row of an epoch, and what it learned counts."""
    steps = Steps(files, monkeypatch)
    rows = steps.known(0)
    rows.has_drawn(1, cursor(1, 0))
    steps.commit(rows, 1, cursor(1, 0))
    for known in (rows, steps.known(1, cursor(1, 0))):
        ranks = known.for_draw(2).ranks(1)
        assert ranks is not None and ranks[3] == pytest.approx(-1.3)
        known.has_drawn(2, cursor(1, 2))
        assert "difficulty" in known.named(2, table(files, 2))
    steps.commit(rows, 2, cursor(1, 2))
    later = rows.for_draw(3).ranks(1)
    assert later is not None and later[3] == pytest.approx(-1.3)


def test_the_epochs_of_tasks_are_ordered_each_by_what_was_known_at_its_begin(
    files: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two tasks with three rows each: one begins its second epoch in step 2, the other in step 3."""

    def at(*places: tuple[int, int]) -> TasksCursor:
        parts = {
            name: replace(cursor(*place), size=3) for name, place in zip("ab", places, strict=True)
        }
        whole = TasksCursor(
            epoch=0, position=0, seed=0, order="difficulty", size=SIZE, digest="d", tasks=parts,
            owed=dict.fromkeys(parts, "0"),
        )  # fmt: skip
        return whole.moved(parts, whole.owed)

    steps = Steps(files, monkeypatch)
    rows = steps.known(0, at((0, 0), (0, 0)))
    assert rows.for_draw(1).ranks(0, "a") is None
    for step, place in ((1, at((0, 2), (0, 1))), (2, at((1, 1), (0, 2))), (3, at((1, 2), (1, 1)))):
        rows.has_drawn(step, place)
        steps.commit(rows, step, place)
    for known in (rows, steps.known(3, at((1, 2), (1, 1)))):
        ranks = known.for_draw(4).ranks
        found = [ranks(1, "a"), ranks(1, "b"), ranks(2, "a")]
        told = [None if one is None else one[0] for one in found]
        assert told == pytest.approx([-1.0, -2.0, -3.0]), "as after steps 1, 2 and 3"
    assert {"difficulty-a", "difficulty-b"} <= set(steps.commits[3].refs)
