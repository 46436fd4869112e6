"""A run that a guard takes back to an earlier step: it goes on in the same flow, as a fork of itself.

The guard watches the learning rate, so that it acts at a known step: from the first step on it is
beyond the bound, after the fourth the run goes back to the second, and the change brings it within.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from storage.audit.audit import audit
from storage.evaluations.results import evaluations_of
from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.live import RolledBack, read_end
from storage.runs.run_store import RollbackCause, RunStore, origin_of
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch, Launched

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

GUARD = (
    "guards=[{name: rate, metric: train/learning_rate, above: 0.002, patience: 4, action: rollback, "
    "rollback: {steps: 2, change: {train.learning_rate: x0.1}}}]"
)
WORDS = ("tiny", "steps=6", "name=back", GUARD)
WHY = (
    "Guard rate: train/learning_rate of step 4 was 0.003, above 0.002 for 4 steps in a row by now."
)


def branches(run: Launched) -> tuple[RunStore, RunStore]:
    """The run that went back, and the one that goes on; there are no others."""
    store = Store(run.store_uri)
    parent, child = sorted(name for name in store.children() if not name.startswith("_"))
    assert child == f"{parent}-rollback-1"
    return RunStore(store, parent), RunStore(store, child)


def check(parent: RunStore, child: RunStore) -> None:
    """What must hold of both, however they came there."""
    assert (head(parent), head(child)) == (4, 6)
    end = read_end(parent)
    assert end is not None
    assert end.rolled_back == RolledBack(to=2, child=child.run, guard="rate", why=WHY)
    origin = origin_of(child)
    assert origin is not None and str(origin) == f"{parent.run}@2"
    assert origin.rollback == RollbackCause(
        run=parent.run, after=4, guard="rate", why=WHY, number=1,
        change=["train.learning_rate=0.0003"],
    )  # fmt: skip
    verdict = read_commit(parent, 4).guards[0]
    assert (verdict.action, verdict.back_to, verdict.beyond) == ("rollback", 2, 4)
    assert [one.crossed for step in range(3, 7) for one in read_commit(child, step).guards] == [
        False
    ] * 4
    for files in (parent, child):
        committed(files)
        assert audit(files).problems == []
    # The ledger goes on from the parent's step 2, and each step counts its four prompts once.
    assert [one.ledger.drawn for one in committed(child)] == [12, 16, 20, 24]


@pytest.mark.slow
def test_a_guard_takes_the_run_back_and_it_ends_by_itself(launch: Launch) -> None:
    run = launch(*WORDS)
    code, out = run.end()
    assert code == 0, out
    parent, child = branches(run)
    check(parent, child)
    assert f"{WHY} The run goes back to step 2, with train.learning_rate=0.0003." in out
    assert f"Run {child.run} goes on after {parent.run}@2." in out
    assert f"{child.run}: 6 steps are committed." in out
    # Steps 3 and 4 are made of other updates, from the same weights and rows.
    assert read_commit(child, 3).version_in == read_commit(parent, 2).version_out
    assert read_commit(child, 3).cursor == read_commit(parent, 3).cursor
    assert read_commit(child, 3).version_out.digest != read_commit(parent, 3).version_out.digest
    code, out = launch("--resume", parent.run).end()
    assert code == 2
    assert out.startswith(f"Run {child.run} is finished: 6 of 6 steps are committed."), out


INSTRUCTIONS = {
    "decided": Fault(id="x", target="tasks.run.run:Run.advance", action="kill", nth=4),
    "given up": Fault(id="x", target="tasks.guards.acting:went_back", action="kill"),
    "pages": Fault(id="x", target="tasks.run.life_cycle:last_pages", action="kill", when="after"),
    "taken over": Fault(id="x", target="tasks.run.opening:begin", action="kill", nth=2),
    "pinned": Fault(id="x", target="storage.runs.forks:pin", action="kill"),
    "on record": Fault(
        id="x", target="tasks.run.opening:begin", action="kill", nth=2, when="after"
    ),
    "ended": Fault(id="x", target="storage.runs.live:write_end", action="kill"),
    "end written": Fault(id="x", target="storage.runs.live:write_end", action="kill", when="after"),
    "first step": Fault(id="x", target="tasks.run.run:Run.advance", action="kill", nth=5),
}


@pytest.fixture(scope="module")
def undisturbed_story(
    prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[object, ...]]:
    """The child of a run that nothing happened to."""
    from tests.flows.conftest import starting

    with starting(tmp_path_factory.mktemp("whole"), prefect_api) as start:
        run = start(*WORDS).whole()
        return story(committed(branches(run)[1]))


@pytest.mark.slow
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_a_kill_within_the_rollback_changes_nothing(
    launch: Launch,
    tmp_path: Path,
    undisturbed_story: list[tuple[object, ...]],
    instruction: str,
) -> None:
    """The parent is resumed by its name, and the child ends as one to which nothing happened."""
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [INSTRUCTIONS[instruction]])
    run = launch(*WORDS, environment=faults.environment)
    code, out = run.end()
    assert (code, faults.missed) == (-9, []), out
    parent = sorted(Store(run.store_uri).children())[0]
    code, out = launch("--resume", parent).end()
    assert code == 0, out
    check(*branches(run))
    assert story(committed(branches(run)[1])) == undisturbed_story


@pytest.mark.slow
def test_steps_under_way_beyond_the_verdict_are_given_up(launch: Launch) -> None:
    """They overlap, and so the child has workers of its own; nothing of them is left."""
    overlap = ("max_staleness=2", "algorithm.correction=[{kind: truncate}]")
    run = launch(*WORDS, *overlap)
    code, out = run.end()
    assert code == 0, out
    parent, child = branches(run)
    assert (head(parent), head(child)) == (4, 6)
    for files in (parent, child):
        committed(files, max_staleness=2)
        assert audit(files).problems == []
    assert run.children() == []


REWARD = '''
def variety(completions, **columns):
    """What a policy that says one thing only cannot get."""
    return [len({letter for letter in text if letter.isdigit()}) / 10 for text in completions]
'''


@pytest.mark.slow
def test_a_planted_collapse_ends_better_with_a_guard_than_without(launch: Launch) -> None:
    """The learning rate is x100 from step 11 on, as a fork; the guard takes that back."""
    own = 'rewards.functions=[{kind: function, path: "variety.py:variety"}]'
    files = {"variety.py": REWARD}
    base = launch("tiny", "steps=10", "name=base", own, files=files)
    code, out = base.end()
    assert code == 0, out
    store, at = Store(base.store_uri), f"{base.files.run}@10"
    planted = ("--fork", at, "steps=24", "train.learning_rate=0.3")
    guard = (
        "guards=[{preset: reward_collapse, window: 3, patience: 2, action: rollback, "
        "rollback: {steps: 6, change: {train.learning_rate: x0.01}}}]"
    )
    for name, words in (("without", ()), ("guarded", (guard,))):
        code, out = launch(*planted, f"name={name}", *words).end()
        assert code == 0, out
    rewards = {}
    for name in store.children():
        run = RunStore(store, name)
        commits = committed(run)
        assert audit(run).problems == []
        last = [one.metrics["reward/mean"] or 0.0 for one in commits[-4:]]
        rewards[name.partition("-")[0] + name[-11:] * ("rollback" in name)] = sum(last) / 4
    (child,) = (RunStore(store, name) for name in store.children() if name.endswith("rollback-1"))
    assert rewards["guarded-rollback-1"] > 2 * rewards["without"], rewards
    origin = origin_of(child)
    assert origin is not None and origin.rollback is not None
    assert origin.rollback.change == ["train.learning_rate=0.003"]
    # Replay and lineage go across: the update is made again, and a sample leads to its row.
    for command in (["replay", child.run, "11"], ["lineage", child.run, "--version", "11"]):
        done = subprocess.run(
            [sys.executable, "-m", f"flows.{command[0]}", *command[1:], "--json"],
            cwd=base.folder, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        json.loads(done.stdout)


OTHERS = """
def others(completions, **columns):
    return [sum(not one.isdigit() for one in text) / max(len(text), 1) for text in completions]
"""


@pytest.mark.slow
def test_a_suite_that_drops_takes_the_run_back_after_a_kill_too(
    launch: Launch, tmp_path: Path
) -> None:
    """The policy is rewarded for digits, and tested for all else, so the evaluations fall.

    0.89, 0.85, 0.83, 0.71, 0.65, 0.38 they were when this was written: the last is half of the mean. The
    flow is killed when that has been measured, and step 6, which judges it, is not committed.
    """
    rows = "".join(json.dumps({"question": f"{n} + {n} = "}) + "\n" for n in range(30, 42))
    suite = {
        "source": {"kind": "file", "path": "rows.jsonl"},
        "samples": 3,
        "greedy": False,
        "rewards": {"functions": [{"kind": "function", "path": "mine.py:others"}]},
    }
    guard = (
        "guards=[{preset: evaluation_drop, metric: eval/others/reward, below_mean: 0.7, "
        "action: rollback, rollback: {steps: 3, change: {train.learning_rate: x0.001}}}]"
    )
    words = (
        "tiny", "steps=7", "name=back", "train.learning_rate=0.03", guard, "evaluation.before=true",
        f"evaluation.suites.others={json.dumps(suite)}", "evaluation.every=1",
    )  # fmt: skip
    kill = Fault(id="x", target="tasks.guards.acting:guards_on", action="kill", nth=6)
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [kill])
    own = {"rows.jsonl": rows, "mine.py": OTHERS}
    run = launch(*words, files=own, environment=faults.environment)
    code, out = run.end()
    assert (code, faults.missed) == (-9, []), out
    code, out = launch("--resume", run.files.run).end()
    assert code == 0, out
    parent, child = branches(run)
    assert (head(parent), head(child)) == (6, 7)

    def reward(files: RunStore, version: int) -> float:
        return evaluations_of(files, "others", version)[-1].metrics["reward"]

    for step in range(1, 7):  # of the version before it, which was measured after its commit
        assert read_commit(parent, step).guards[0].value == reward(parent, step - 1)
    verdict = read_commit(parent, 6).guards[0]
    assert (verdict.guard, verdict.action, verdict.back_to) == ("evaluation_drop", "rollback", 3)
    assert verdict.threshold is not None and verdict.value is not None
    assert verdict.value < verdict.threshold
    assert reward(child, 7) > 1.5 * reward(parent, 5), "it no longer falls"
    for files in (parent, child):
        committed(files)
        assert audit(files).problems == []
