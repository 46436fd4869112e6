"""What guards decide on a row of values, and that a commit is all that the next verdict needs."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.grpo import GRPOConfig
from configs.guards import GuardConfig
from configs.recipe import load_recipe
from storage.runs.commit_log import GuardRecord
from tasks.guards.judging import bound_in_force, judge, pending_rollback, verdicts

SIZE = "train/rollout_effective_sample_size"
GAP = "train/rollout_mismatch"


def guard(metric: str = GAP, **settings: Any) -> GuardConfig:
    return GuardConfig.model_validate({"metric": metric, **settings})


def settings(*guards: str, words: tuple[str, ...] = ()) -> GRPOConfig:
    """The recipe `tiny` with 20 steps and these guards."""
    return load_recipe(GRPOConfig, "tiny", ["steps=20", *words, f"guards=[{', '.join(guards)}]"])


def run_of(watch: GuardConfig, values: list[float | None]) -> list[GuardRecord]:
    """The records of steps with these values, each passed on as a commit stores it."""
    found: list[GuardRecord] = []
    for value in values:
        before = GuardRecord.model_validate_json(found[-1].model_dump_json()) if found else None
        found.append(judge(watch, before, value))
    return found


def acted(records: list[GuardRecord]) -> list[int]:
    """Steps after which the guard acts."""
    return [step for step, one in enumerate(records, 1) if one.action is not None]


@pytest.mark.parametrize(
    ("bound", "value", "crossed"),
    [
        ({"above": 0.2}, 0.2, False),
        ({"above": 0.2}, 0.21, True),
        ({"above": 0.2}, math.nan, True),
        ({"above": 0.2}, math.inf, True),
        ({"below": 0.5}, 0.5, False),
        ({"below": 0.5}, 0.49, True),
        ({"below": 0.5}, math.nan, True),
    ],
)
def test_a_bound_is_crossed_on_its_own_side(
    bound: dict[str, float], value: float, crossed: bool
) -> None:
    record = judge(guard(patience=1, **bound), None, value)
    assert record.crossed is crossed
    assert acted([record]) == [1] * crossed
    assert record.value == (value if math.isfinite(value) else None)


def test_only_steps_in_a_row_count() -> None:
    records = run_of(guard(above=0.2, patience=3), [0.3, 0.3, 0.1, 0.3, None, 0.3, 0.3, 0.3])
    # A step without the metric says nothing: the count stays.
    assert [one.beyond for one in records] == [1, 2, 0, 1, 1, 2, 3, 4]
    assert acted(records) == [7]


def test_a_warning_is_given_again_only_after_as_many_good_steps() -> None:
    bad, good = [0.3] * 2, [0.1] * 2
    values = [*bad, *bad, 0.1, *bad, *good, *bad]
    assert acted(run_of(guard(above=0.2, patience=2), values)) == [2, 11]


def test_a_running_mean_is_of_good_steps_and_known_after_its_window() -> None:
    watch = guard("reward/mean", below_mean=0.5, window=3, patience=1)
    records = run_of(watch, [0.0, 1.0, 2.0, 0.6, 0.4, 0.4])
    assert [one.threshold for one in records[:3]] == [None] * 3
    assert [one.threshold for one in records[3:]] == pytest.approx([0.5, 1.3 / 3, 1.3 / 3])
    assert [one.mean for one in records] == pytest.approx([0, 0.5, 1.0, 2.6 / 3, 2.6 / 3, 2.6 / 3])
    assert acted(records) == [5], "the values beyond the bound do not move it"


@pytest.mark.parametrize(
    ("bound", "mean", "threshold"),
    [
        ({"above_mean": 2.0}, 3.0, 6.0),
        ({"below_mean": 0.5}, 3.0, 1.5),
        ({"above_mean": 2.0}, -3.0, 0.0),
        ({"below_mean": 0.5}, -3.0, -4.5),
    ],
)
def test_a_negative_mean_has_its_bound_on_the_same_side(
    bound: dict[str, float], mean: float, threshold: float
) -> None:
    assert guard(**bound).threshold(mean) == threshold


@given(
    values=st.lists(st.none() | st.floats(-1, 1) | st.just(math.nan), max_size=60),
    patience=st.integers(1, 5),
    by_mean=st.booleans(),
)
def test_between_two_actions_are_as_many_good_steps_as_bad_ones(
    values: list[float | None], patience: int, by_mean: bool
) -> None:
    """Hysteresis, on any sequence: an action ends `patience` bad steps, and needs as many good ones."""
    bound = {"below_mean": 0.5, "window": 2} if by_mean else {"below": 0.0}
    records = run_of(guard(patience=patience, **bound), values)
    spoke = [one for one, value in zip(records, values, strict=True) if value is not None]
    steps = acted(spoke)
    for step in steps:
        assert step >= patience
        assert all(one.crossed for one in spoke[step - patience : step])
    for before, after in itertools.pairwise(steps):
        between = [not one.crossed for one in spoke[before : after - patience]]
        assert patience in [sum(between[at : at + patience]) for at in range(len(between))]


def say(
    config: GRPOConfig, step: int, metrics: dict[str, float], **given: Any
) -> list[GuardRecord]:
    known = {"last": None, "start": 0, "max_staleness": 0, "rollbacks": 0} | given
    return verdicts(config, step, metrics=metrics, **known)


BACK = (
    "{name: a, metric: m, above: 1, patience: 1, action: rollback, "
    "rollback: {steps: 4, change: {train.learning_rate: x0.1, algorithm.kl.coefficient: 0.02}}}"
)
STOP = "{name: b, metric: m, above: 1, patience: 1, action: stop}"
FURTHER = "{name: c, metric: m, above: 1, patience: 1, action: rollback, rollback: {steps: 6}}"


@pytest.mark.parametrize(
    ("step", "start", "rollbacks", "action", "to"),
    [
        (10, 0, 0, "rollback", 6),
        (3, 0, 0, "rollback", 1),  # there is no committed step before the first
        (10, 8, 0, "rollback", 6),  # a step of its parent
        (10, 0, 2, "rollback", 6),
        (10, 0, 3, "stop", None),  # max_rollbacks are spent
        (1, 0, 0, "stop", None),
        (20, 0, 0, "rollback", 16),
        (20, 0, 3, None, None),  # nothing is left to stop
    ],
)
def test_where_a_rollback_leads(
    step: int, start: int, rollbacks: int, action: str | None, to: int | None
) -> None:
    (record,) = say(settings(BACK), step, {"m": 2.0}, start=start, rollbacks=rollbacks)
    assert (record.action, record.back_to) == (action, to)
    changes = ["train.learning_rate=0.0003", "algorithm.kl.coefficient=0.02"]
    assert record.change == (changes if action == "rollback" else [])


def test_one_guard_ends_the_branch_and_goes_back_furthest() -> None:
    records = say(settings(STOP, BACK, FURTHER), 10, {"m": 2.0})
    assert [one.action for one in records] == ["warn", "warn", "rollback"]
    assert pending_rollback(SimpleNamespace(guards=records)) == records[2]  # type: ignore[arg-type]
    records = say(settings(STOP, BACK, FURTHER), 10, {"m": 2.0}, rollbacks=3)
    assert [one.action for one in records] == ["stop", "warn", "warn"]


def test_a_fork_counts_anew_and_keeps_the_mean() -> None:
    config = settings("{metric: m, below_mean: 0.5, window: 2, patience: 3, action: stop}")
    last: Any = None
    for step, value in enumerate((1.0, 1.0, 0.1, 0.1), 1):
        last = SimpleNamespace(guards=say(config, step, {"m": value}, last=last))
    (own,) = say(config, 5, {"m": 0.1}, last=last)
    assert (own.beyond, own.action) == (3, "stop")
    (forked,) = say(config, 5, {"m": 0.1}, last=last, start=4)
    assert (forked.beyond, forked.action, forked.threshold) == (1, None, 0.5)
    (resumed,) = say(config, 6, {"m": 0.1}, last=SimpleNamespace(guards=[own]))
    assert (resumed.beyond, resumed.action) == (1, None), "a person resumed what it had stopped"


OVERLAP = ("max_staleness=2", "algorithm.correction=[{kind: truncate}]")
SYNC = f"{{metric: {GAP}, above: 0.2, patience: 1, action: synchronous}}"


def test_what_is_synchronous_already_is_not_guarded() -> None:
    config = settings(SYNC, words=OVERLAP)
    assert say(config, 2, {GAP: 9.0}, max_staleness=0) == []
    (record,) = say(config, 2, {GAP: 9.0}, max_staleness=2)
    assert record.action == "synchronous"


def test_the_last_commit_says_what_is_in_force() -> None:
    guarded, plain = settings(SYNC, words=OVERLAP), settings(words=OVERLAP)

    def commit(bound: float | None) -> Any:
        return SimpleNamespace(metrics={} if bound is None else {"staleness/bound": bound})

    assert bound_in_force(guarded, None) == 2
    assert bound_in_force(guarded, commit(0.0)) == 0
    assert bound_in_force(guarded, commit(None)) == 2, "of a run before there was a guard"
    assert bound_in_force(plain, commit(0.0)) == 2, "a person took the guard away"
