"""What the guard of overlapping steps decides, and what it finds in the last commit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from configs.staleness_guard import StalenessGuardConfig
from tasks.run import staleness_guard
from tasks.run.staleness_gate import Gate
from tasks.run.staleness_guard import (
    BEYOND,
    BOUND,
    StalenessGuardStopped,
    Verdict,
    bound_in_force,
    carry_out,
    judge,
    recorded,
    verdict_on,
)

SIZE = "train/rollout_effective_sample_size"
GAP = "train/rollout_mismatch"


def guard(metric: str = GAP, bound: float = 0.2, **settings: Any) -> StalenessGuardConfig:
    return StalenessGuardConfig.model_validate({"metric": metric, "bound": bound, **settings})


def settings(**guarded: Any) -> GRPOConfig:
    """The recipe `tiny` with steps that overlap, and a guard if its settings are given."""
    words = ["steps=3", "max_staleness=2", "algorithm.correction=[{kind: truncate}]"]
    words += [f"staleness_guard.{name}={value}" for name, value in guarded.items()]
    return load_recipe(GRPOConfig, "tiny", words)


def commit(**metrics: float | None) -> Any:
    return SimpleNamespace(metrics={f"staleness/{name}": value for name, value in metrics.items()})


def run_of(config: GRPOConfig, last: Any = None, head: int = 0, start: int = 0) -> Any:
    gate = Gate(head, bound_in_force(config, last if head > start else None), deadline=30)
    said: list[str] = []
    terminal = SimpleNamespace(say=lambda text, style="": said.append(text))
    return SimpleNamespace(
        config=config, gate=gate, last=last, head=head, start=start, name="r", terminal=terminal,
        said=said,
    )  # fmt: skip


def verdict_of(run: Any, metrics: dict[str, float]) -> Verdict | None:
    """As the commit task asks for it."""
    last = run.last if run.head > run.start else None
    return verdict_on(run.config, run.gate.max_staleness, last, metrics)


@pytest.mark.parametrize(
    ("metric", "bound", "value", "crossed"),
    [
        (GAP, 0.2, 0.2, False),
        (GAP, 0.2, 0.21, True),
        (GAP, 0.2, math.nan, True),
        (GAP, 0.2, math.inf, True),
        (SIZE, 0.5, 0.5, False),
        (SIZE, 0.5, 0.49, True),
        (SIZE, 0.5, math.nan, True),
    ],
)
def test_a_bound_is_crossed_on_its_own_side(
    metric: str, bound: float, value: float, crossed: bool
) -> None:
    assert guard(metric, bound).crossed_by(value) is crossed


def test_only_steps_in_a_row_count() -> None:
    watch, counts, due = guard(patience=3), 0, []
    for value in (0.3, 0.3, 0.1, 0.3, None, 0.3, 0.3):
        verdict = judge(watch, 2, counts, value)
        counts = verdict.beyond
        due.append((counts, verdict.due, verdict.max_staleness))
    # A step without the metric says nothing: the count stays.
    assert due == [
        (1, False, 2), (2, False, 2), (0, False, 2), (1, False, 2), (1, False, 2), (2, False, 2), (3, True, 0),
    ]  # fmt: skip


def test_what_is_synchronous_already_is_not_guarded() -> None:
    verdict = judge(guard(patience=1), 0, 0, 9.0)
    assert (verdict.max_staleness, verdict.beyond, verdict.due) == (0, 0, False)


def test_to_stop_lowers_nothing() -> None:
    verdict = judge(guard(patience=1, action="stop"), 2, 0, 9.0)
    assert (verdict.max_staleness, verdict.due) == (2, True)


def test_the_last_commit_says_what_is_in_force() -> None:
    guarded, plain = settings(metric=GAP, bound=0.2), settings()
    assert bound_in_force(guarded, None) == 2
    assert bound_in_force(guarded, commit(bound=0.0)) == 0
    assert bound_in_force(guarded, commit(max=1.0)) == 2, "of a run before there was a guard"
    assert bound_in_force(plain, commit(bound=0.0)) == 2, "a person took the guard away"


@pytest.mark.parametrize(("before", "now"), [(0, 1), (1, 2), (2, 3), (3, 1)])
def test_the_last_commit_says_how_often(before: int, now: int) -> None:
    """With three the guard had stopped the run: whoever resumes it begins to count anew."""
    config = settings(metric=GAP, bound=0.2, action="stop")
    run = run_of(config, commit(bound=2.0, steps_beyond=before), head=4)
    verdict = verdict_of(run, {GAP: 0.3})
    assert verdict is not None and verdict.beyond == now
    assert recorded(run.config, verdict) == {BOUND: 2.0, BEYOND: float(now)}


def test_a_fork_has_its_own_overlap() -> None:
    config = settings(metric=GAP, bound=0.2)
    run = run_of(config, commit(bound=0.0, steps_beyond=2.0), head=4, start=4)
    verdict = verdict_of(run, {GAP: 0.3})
    assert verdict is not None and (verdict.beyond, verdict.max_staleness) == (1, 2)


def test_without_a_guard_only_the_bound_is_recorded() -> None:
    run = run_of(settings())
    assert recorded(run.config, verdict_of(run, {GAP: 9.0})) == {BOUND: 2.0}
    still = run_of(load_recipe(GRPOConfig, "tiny"))
    assert recorded(still.config, verdict_of(still, {GAP: 9.0})) == {}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Events and warnings of the guard."""
    told: list[Any] = []
    monkeypatch.setattr(
        staleness_guard.events, "emit", lambda event, run, **facts: told.append((event, facts))
    )
    logger = SimpleNamespace(warning=told.append)
    monkeypatch.setattr(staleness_guard, "get_run_logger", lambda: logger)
    return told


def test_synchronous_from_now_on(sent: list[Any]) -> None:
    run = run_of(settings(metric=SIZE, bound=0.5, patience=1))
    metrics = {SIZE: 0.25}
    carry_out(run, run.gate, 1, verdict_of(run, metrics), metrics)
    (said,) = run.said
    assert said.startswith(f"{SIZE} of step 1 was 0.25, below staleness_guard.bound = 0.5. ")
    assert said.endswith("To overlap again, resume with staleness_guard=null.")
    assert run.gate.max_staleness == 0
    run.gate.check_end(1)
    assert sent[0] == said
    event, facts = sent[1]
    assert event == "refrain.guard.staleness"
    assert facts == {
        "step": 1,
        "metric": SIZE,
        "value": 0.25,
        "bound": 0.5,
        "action": "synchronous",
    }


def test_stopped(sent: list[Any]) -> None:
    last = commit(bound=2.0, steps_beyond=1)
    run = run_of(settings(metric=GAP, bound=0.2, patience=2, action="stop"), last, head=1)
    metrics = {GAP: 0.3}
    carry_out(run, run.gate, 2, verdict_of(run, metrics), metrics)
    assert run.gate.max_staleness == 2
    run.gate.check_end(1)
    with pytest.raises(StalenessGuardStopped) as caught:
        run.gate.check_end(2)
    assert str(caught.value) == (
        f"{GAP} of step 2 was 0.3, above staleness_guard.bound = 0.2 for 2 steps in a row by now. "
        "Resume with staleness_guard.action=synchronous, a higher staleness_guard.bound, or "
        "staleness_guard=null."
    )


def test_after_the_last_step_there_is_nothing_to_end(sent: list[Any]) -> None:
    run = run_of(settings(metric=GAP, bound=0.2, patience=1, action="stop"), commit(), head=2)
    carry_out(run, run.gate, 3, verdict_of(run, {GAP: 0.3}), {GAP: 0.3})
    run.gate.check_end(3)
    assert (run.said, sent) == ([], [])


def test_nothing_is_said_before_its_time(sent: list[Any]) -> None:
    run = run_of(settings(metric=GAP, bound=0.2))
    for metrics in ({GAP: 0.1}, {GAP: 0.3}, {}):
        carry_out(run, run.gate, 1, verdict_of(run, metrics), metrics)
    assert (run.said, sent, run.gate.max_staleness) == ([], [], 2)
