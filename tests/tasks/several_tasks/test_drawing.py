"""Weights of tasks by step, and by the success that earlier commits tell."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.data import SuccessCurriculum
from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.forks import begin_at
from storage.runs.run_store import RunStore
from tasks.several_tasks.drawing import factor, rate, weights
from tests.flows.conftest import ROOT
from tests.storage.audit import small_run

EXAMPLE = str(ROOT / "examples/two_tasks.yaml")
RIGHT = {
    1: {"digits": 0.0, "letters": 0.5},
    2: {"letters": 0.9},
    3: {"digits": 0.2, "letters": 1.0},
}


def run_of(files: RunStore, *words: str) -> Any:
    """What the weights are made of: settings, and where commits lie."""
    return SimpleNamespace(files=files, config=load_recipe(GRPOConfig, EXAMPLE, list(words)))


@pytest.fixture
def files(tmp_path: Path) -> RunStore:
    """Three steps, whose commits tell what share of each task's samples was right."""
    run = RunStore(Store(f"file://{tmp_path}"), "run")
    small_run.begin(run)
    last = None
    for step, rates in RIGHT.items():
        metrics = {f"task/{name}/right": value for name, value in rates.items()}
        last = small_run.take(run, step, last, metrics=metrics)
    return run


def test_weights_change_from_a_step_on(files: RunStore) -> None:
    run = run_of(files, "data.source.tasks.digits.from_step={10: 0.1, 3: 0}")
    found = [weights(run, step)["digits"] for step in (1, 2, 3, 9, 10, 99)]
    assert found == [2, 2, 0, 0, Fraction(1, 10), Fraction(1, 10)]


def test_half_right_counts_most() -> None:
    rule = SuccessCurriculum(floor=0.2)
    assert [factor(rule, right) for right in (0, 0.25, 0.5, 1)] == [0.2, 0.75, 1.0, 0.2]


def test_success_is_the_mean_over_the_last_steps_with_samples(files: RunStore) -> None:
    run = run_of(files, "data.source.curriculum={steps: 2, floor: 0.2}")
    assert rate(run, 1, "digits") == 0.5, "nothing is known yet"
    assert rate(run, 2, "digits") == 0.0
    assert rate(run, 4, "letters") == pytest.approx(0.95)
    assert rate(run, 4, "digits") == pytest.approx(0.1), "step 2 had none"
    # digits 2 x 0.36, letters 1 x 0.2
    assert weights(run, 4) == {"digits": 783, "letters": 217}


def test_a_draw_goes_by_steps_that_are_committed_whatever_overlaps(files: RunStore) -> None:
    run = run_of(
        *(files, "data.source.curriculum={steps: 1}", "max_staleness=2"),
        "algorithm.correction=[{kind: truncate}]",
    )
    assert rate(run, 3, "letters") == 0.5, "steps 1 and 2 may be under way"
    assert rate(run, 4, "letters") == 0.5
    assert rate(run, 5, "letters") == 0.9
    assert rate(run, 6, "letters") == 1.0


def test_a_fork_knows_its_parents_steps(files: RunStore) -> None:
    child = RunStore(files.store, "child")
    small_run.begin(child, begin_at(files, 2, fork=True))
    run = run_of(child, "data.source.curriculum={steps: 1}")
    assert rate(run, 3, "letters") == 0.9


def test_a_task_without_weight_stays_without(files: RunStore) -> None:
    run = run_of(files, "data.source.curriculum={}", "data.source.tasks.letters.weight=0")
    assert weights(run, 4) == {"digits": 1000, "letters": 0}
