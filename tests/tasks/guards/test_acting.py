"""What follows from verdicts: the gate, words, events; and how far back a run can go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.runs.commit_log import GuardRecord
from storage.runs.forks import NoSuchOrigin
from storage.runs.run_store import RollbackCause
from tasks.guards import acting, listener
from tasks.guards.acting import GuardStopped, WentBack, carry_out, child_name, guards_on, judge_step
from tasks.reporting.progress import ProgressLine
from tasks.run.clock import Gate
from tasks.run.events import Listeners, Reports
from tasks.run.features import features_of

BACK = (
    "guards=[{name: g, metric: m, above: 1, patience: 1, action: rollback, "
    "rollback: {steps: 6, change: {train.learning_rate: x0.1}}}]"
)


def run_of(*words: str, start: int = 0, rollbacks: int = 0) -> Any:
    config = load_recipe(GRPOConfig, "tiny", ["steps=20", *words])
    said: list[str] = []
    terminal: Any = SimpleNamespace(say=lambda text, style="": said.append(text))
    listeners = Listeners()
    ProgressLine(terminal, config.steps).listen(listeners)
    facts: Any = SimpleNamespace(name="r")
    tracking: Any = None
    listener.listen(facts, Reports(listeners=listeners, tracking=tracking))
    cause = RollbackCause(run="p", after=3, guard="g", why="", number=max(1, rollbacks))
    origin = SimpleNamespace(rollback=cause) if rollbacks else None
    return SimpleNamespace(
        config=config, gate=Gate(0, config.max_staleness, deadline=30), name="r", said=said,
        flow="flows.grpo:grpo", start=start, head=9, last=None, origin=origin, files=None, measured={},
        tell=listeners.tell,
    )  # fmt: skip


def take_up(run: Any) -> None:
    """As a flow does that goes on."""
    position: Any = SimpleNamespace(carried=[], last=run.last)
    for feature in features_of(run.config, position):
        feature.take_up(run)


def record(action: str | None, **changes: Any) -> GuardRecord:
    given = {"guard": "g", "metric": "m", "value": 2.0, "threshold": 1.0, "crossed": True}
    return GuardRecord.model_validate({**given, "beyond": 3, "action": action, **changes})


def commit(*records: GuardRecord) -> Any:
    return SimpleNamespace(step=10, guards=list(records))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Events and warnings of the guards."""
    told: list[Any] = []
    monkeypatch.setattr(listener, "emit", lambda event, run, **facts: told.append((event, facts)))
    monkeypatch.setattr(acting, "get_run_logger", lambda: SimpleNamespace(warning=told.append))
    return told


WHY = "Guard g: m of step 10 was 2, above 1 for 3 steps in a row by now."


def test_a_warning_changes_nothing(sent: list[Any]) -> None:
    run = run_of(BACK)
    carry_out(run, commit(record("warn"), record(None)))
    run.gate.check_end(10)
    assert run.said == [WHY]
    assert sent == [
        WHY,
        ("refrain.guard.acted",
         {"step": 10, "guard": "g", "metric": "m", "action": "warn", "value": 2.0, "threshold": 1.0}),
    ]  # fmt: skip


def test_overlap_ends(sent: list[Any]) -> None:
    run = run_of(
        "max_staleness=2",
        "algorithm.correction=[{kind: truncate}]",
        "guards=[{metric: m, above: 1, patience: 1, action: synchronous}]",
    )
    assert judge_step(run, 10, {"m": 1.0}).metrics == {}
    assert judge_step(run, 10, {"m": 2.0}).metrics == {"staleness/bound": 0.0}
    carry_out(run, commit(record("synchronous")))
    assert run.gate.max_staleness == 0
    assert run.said[0].endswith("To overlap again, resume with guards=[].")
    run.gate = Gate(10, 2, deadline=30)
    run.last = SimpleNamespace(metrics={"staleness/bound": 0.0}, guards=[])
    take_up(run)
    assert run.gate.max_staleness == 0, "of a run that was resumed after it"


@pytest.mark.parametrize("words", [(BACK,), ()], ids=["guarded", "without guards since"])
def test_what_a_flow_died_after_is_carried_out(words: tuple[str, ...]) -> None:
    run, back = run_of(*words), record("rollback", back_to=4)
    run.head, run.last = 10, commit(back)
    take_up(run)
    with pytest.raises(WentBack) as caught:
        run.gate.check_end(10)
    assert (caught.value.record, caught.value.step) == (back, 10)
    run.gate, run.last = Gate(10, 0, deadline=30), commit(record("stop"))
    take_up(run)
    run.gate.check_end(10)  # a person has resumed what was stopped


def test_a_stop_says_how_to_go_on(sent: list[Any]) -> None:
    run = run_of(BACK, rollbacks=3)
    carry_out(run, commit(record("stop")))
    with pytest.raises(GuardStopped) as caught:
        run.gate.check_end(10)
    assert str(caught.value) == (
        f"{WHY} It would go back, and max_rollbacks = 3 are spent. Look at the run, then go on by "
        "refrain grpo --resume r, with another bound of the guard or guards=[], or from an "
        "earlier step by refrain grpo --fork r@4."
    )
    assert run.said == []


def test_a_rollback_ends_the_branch_with_its_record(sent: list[Any]) -> None:
    run, back = run_of(BACK), record("rollback", back_to=4, change=["train.learning_rate=0.0003"])
    carry_out(run, commit(back))
    with pytest.raises(WentBack) as caught:
        run.gate.check_end(10)
    assert (caught.value.record, caught.value.step) == (back, 10)
    assert run.said == [f"{WHY} The run goes back to step 4, with train.learning_rate=0.0003."]
    assert sent[1][1]["back_to"] == 4


@pytest.mark.parametrize(("gone", "to"), [(False, 4), (True, 8)])
def test_before_its_branch_a_run_goes_back_where_the_store_allows(
    monkeypatch: pytest.MonkeyPatch, gone: bool, to: int
) -> None:
    asked: list[int | None] = []

    def begin_at(files: object, step: int | None, *, fork: bool) -> None:
        asked.append(step)
        if gone:
            raise NoSuchOrigin("retention removed it")

    monkeypatch.setattr(acting, "begin_at", begin_at)
    (found,) = guards_on(run_of(BACK, start=8), 10, {"m": 2.0})
    assert (found.back_to, asked) == (to, [4])
    (own,) = guards_on(run_of(BACK, start=3), 10, {"m": 2.0})
    assert (own.back_to, asked) == (4, [4]), "of its own steps retention keeps what it needs"


def test_children_are_numbered_on_by_the_first_name() -> None:
    first = child_name("tiny-20261124-ab12", 1)
    assert first == "tiny-20261124-ab12-rollback-1"
    assert child_name(first, 2) == "tiny-20261124-ab12-rollback-2"


def test_what_was_measured_between_two_commits_is_judged_once(sent: list[Any]) -> None:
    """An evaluation of a version ends after its step's commit; the next step's judges it."""
    run = run_of("guards=[{preset: evaluation_drop, metric: eval/x/reward, below: 0.5}]")
    run.measured = {"eval/x/reward": 0.25, "eval/y/reward": 1.0}
    (found,) = guards_on(run, 10, {"m": 2.0})
    assert (found.value, found.action) == (0.25, "warn")
    (again,) = guards_on(run, 10, {"m": 2.0})
    assert again == found, "a commit that is tried again says the same"
    carry_out(run, commit(found))
    assert run.measured == {"eval/y/reward": 1.0}
