"""What a run's picture shows is kept in one object, and read from the commits where that is wrong."""

import itertools
import logging

import pytest

from storage.objects import documents
from storage.objects.usage import COUNTER
from storage.runs.commit_log import Commit, commit, read_outline
from storage.runs.curves import FORMAT, History, are_due, read_history, shown, write_curves
from storage.runs.run_store import RunStore
from tests.storage.runs.test_commit_log import version


def make(run: RunStore, steps: int) -> History:
    made: History = []
    for step in range(1, steps + 1):
        metrics = {"reward/mean": step / 4, "time/update": 0.5, "other": 1.0, "retries": 0.0}
        if step % 3 == 0:
            metrics["train/kl_ref"] = float("nan")
        if step == 2:
            metrics["time/snapshot"] = 2.0
        record = Commit(
            step=step,
            parent=step - 1,
            version_in=version(step - 1),
            version_out=version(step),
            metrics=metrics,
        )
        made.append((step, shown(commit(run, record).metrics)))
    return made


def test_kept_and_read_are_the_same(run: RunStore) -> None:
    made = make(run, 13)
    assert made[1] == (
        2,
        {"reward/mean": 0.5, "time/update": 0.5, "retries": 0.0, "time/snapshot": 2.0},
    )
    assert read_history(run, 13) == made
    write_curves(run, 10, made)
    before = COUNTER.total()
    assert read_history(run, 13) == made
    assert (COUNTER.total() - before).requests <= 8  # three commits since, not thirteen
    write_curves(run, 13, made)
    assert read_history(run, 13) == made


@pytest.mark.parametrize("how", ["damaged", "of other commits", "ahead", "too short"])
def test_curves_that_do_not_hold_are_not_believed(
    run: RunStore, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(run, 7)
    write_curves(run, 5, [(step, {**metrics, "reward/mean": 9.0}) for step, metrics in made])
    assert read_history(run, 7)[0][1]["reward/mean"] == 9.0
    key = "run/curves.json"
    body = documents.read(run.store, key, FORMAT)
    wrong = {
        "of other commits": {"commit_digest": "xxh3:0"},
        "ahead": {"step": 8, "first": 4},
        "too short": {"step": 6},
    }.get(how, {})
    data = documents.encode(FORMAT, body | wrong)
    run.store.write(key, data if wrong else data[:-5])
    with caplog.at_level(logging.WARNING):
        assert read_history(run, 7) == made
    assert "The commits are read instead." in caplog.text
    assert read_outline(run, 7).step == 7


def test_what_is_written_grows_with_the_steps_and_not_with_their_square() -> None:
    def written(steps: int) -> int:  # rows of all writes
        return sum(step for step in range(1, steps + 1) if are_due(step))

    assert written(100_000) < 2.5 * written(50_000)
    due = [step for step in range(1, 100_001) if are_due(step)]
    for before, after in itertools.pairwise([0, *due]):
        assert after - before <= max(10, before // 100)
