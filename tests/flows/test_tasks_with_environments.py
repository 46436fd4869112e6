"""A task with an environment and one without in one run: learned, killed, replayed, evaluated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from storage.audit.audit import audit
from storage.evaluations.results import evaluations_of
from storage.runs.commit_log import Commit
from tests.faults.ledger import committed
from tests.faults.planted import Fault
from tests.flows.conftest import AFTER_STEP_3, ROOT, Launch, Launched, ends_alike, starting

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = "game_and_answers.yaml"
HELD_OUT = "source: {kind: function, path: 'two_tasks.py:questions', params: {rows: 6}}"
WORDS = (
    RECIPE, "steps=5", "prompts_per_step=3",
    f"evaluation={{before: false, every: 5, suites: {{games: {{{HELD_OUT}, task: game}}, "
    f"words: {{{HELD_OUT}, task: answers}}}}}}",
)  # fmt: skip
FAULTS = {
    "between two steps": AFTER_STEP_3,
    "between two turns": Fault(id="turn", target="tasks.episodes:answer", action="kill", nth=9),
}


def example() -> dict[str, str]:
    return {name: (ROOT / "examples" / name).read_text() for name in ("two_tasks.py", RECIPE)}


@pytest.fixture(scope="module")
def whole(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A run to which nothing happened."""
    with starting(tmp_path_factory.mktemp("whole"), prefect_api) as start:
        return start(*WORDS, files=example()).whole()


def of_task(run: Launched, commit: Commit, task: str) -> dict[str, list[object]]:
    """Columns of a task's samples in a step."""
    samples = commit.refs["samples"]
    names = np.array(samples.fetch_list(run.files.store, "task"))
    own = samples.take(np.flatnonzero(names == task))
    columns = ("group_id", "episode", "turn_rewards", "observations", "reward", "author", "status")
    return {name: own.fetch_list(run.files.store, name) for name in columns}


def test_each_task_is_played_in_its_own_way(whole: Launched) -> None:
    for commit in committed(whole.files):
        games, answers = (of_task(whole, commit, task) for task in ("game", "answers"))
        assert Counter(games["group_id"]).keys() & Counter(answers["group_id"]).keys() == set()
        assert set(Counter(games["group_id"]).values()) == {8}
        assert set(Counter(answers["group_id"]).values()) == {6}
        for turns, reward, authors in zip(
            games["turn_rewards"], games["reward"], games["author"], strict=True
        ):
            assert len(turns) == 2 and reward == pytest.approx(float(np.sum(turns)))
            parts = [
                (who, len(list(tokens))) for who, tokens in groupby(np.asarray(authors).tolist())
            ]
            assert [who for who, _ in parts] == [1, 2, 1] and parts[1][1] == 2
            assert max(parts[0][1], parts[2][1]) <= 8, "max_turn_tokens"
        assert set(map(str, games["episode"])) == {"done"}
        for turns, authors, end in zip(
            answers["turn_rewards"], answers["author"], answers["episode"], strict=True
        ):
            assert set(np.asarray(authors).tolist()) <= {1}, "nothing answers them"
            assert end == "tokens" or (end == "done" and len(turns) == 1)
            assert not np.isfinite(np.asarray(turns, float)).any()
    assert audit(whole.files).problems == []


def test_metrics_and_evaluations_are_of_their_task(whole: Launched) -> None:
    last = committed(whole.files)[-1]
    for task, reward, size in (("game", "environment", 8), ("answers", "letters", 6)):
        found = of_task(whole, last, task)
        mean = float(np.mean(np.asarray(found["reward"], float)))
        assert last.metrics[f"task/{task}/reward/mean"] == pytest.approx(mean)
        assert last.metrics[f"task/{task}/reward/{reward}"] == pytest.approx(mean)
        prompts = last.metrics[f"task/{task}/prompts"]
        assert last.metrics[f"task/{task}/samples/total"] == size * prompts
    suites = {one.suite: one for one in evaluations_of(whole.files)}
    assert sorted(suites) == ["games", "words"]
    for name, turns in (("games", 2), ("words", 1)):
        samples, store = suites[name].samples, whole.files.store
        played = samples.fetch_list(store, "observations")
        ends = samples.fetch_list(store, "episode")
        assert len(played) == 6 and suites[name].version == 5
        for answered, end in zip(played, ends, strict=True):
            assert isinstance(answered, list)
            assert len(answered) == turns if end == "done" else len(answered) < turns


def test_a_step_is_replayed_and_its_games_are_played_again(whole: Launched) -> None:
    for words in (("3", "--json"), ("3", "--episodes", "--json")):
        done = subprocess.run(
            [sys.executable, "-m", "flows.replay", whole.files.run, *words],
            cwd=whole.folder, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        assert found.get("equal", True) is True and found.get("differing", []) == []


@pytest.mark.parametrize("when", FAULTS)
def test_a_run_whose_flow_dies_ends_as_one_to_which_nothing_happened(
    launch: Launch, whole: Launched, tmp_path: Path, when: str
) -> None:
    for name, text in example().items():
        (tmp_path / name).write_text(text)
    ends_alike(whole, launch, tmp_path, WORDS, FAULTS[when])


def test_episodes_that_are_driven_apart_are_the_same(launch: Launch, whole: Launched) -> None:
    run = launch(*WORDS, "steps=2", "episodes.drive=apart", files=example()).whole()
    found, expected = (
        [one.version_out.digest for one in committed(one.files)[:2]] for one in (run, whole)
    )
    assert found == expected


def test_games_that_a_step_does_not_wait_for_are_handed_on(launch: Launch) -> None:
    run = launch(
        *(RECIPE, "steps=5", "prompts_per_step=4", "max_staleness=1"),
        *("rollout.over_sampling=1.5", "rollout.partial_rollout=carry"),
        "algorithm.correction=[{kind: truncate}]",
        files=example(),
    ).whole()
    assert audit(run.files).problems == []
    commits = committed(run.files, max_staleness=1)
    assert sum(len(one.carried) for one in commits) > 0
    for commit in commits:
        for task, size in (("game", 8), ("answers", 6)):
            groups = Counter(of_task(run, commit, task)["group_id"])
            assert set(groups.values()) <= {size}


def test_both_are_learned_though_each_undoes_what_the_other_teaches(launch: Launch) -> None:
    run = launch(RECIPE, files=example()).whole()
    commits = committed(run.files)
    for task, first in (("game", 0.3), ("answers", 0.7)):
        curve = [one.metrics[f"task/{task}/reward/mean"] or 0.0 for one in commits]
        assert max(curve[:2]) < first < 0.75 < min(curve[-2:]), (task, curve)


def test_environments_that_fail_cost_their_own_task_alone(launch: Launch) -> None:
    """A crash of one task's environment: its groups are left out, and the other's train."""
    crashing = example()
    crashing["two_tasks.py"] += (
        "\n\nclass Crashing(Twice):\n    def step(self, text: str) -> tuple[str, float, bool]:\n"
        "        raise RuntimeError('the table fell over')\n"
    )
    run = launch(
        *(RECIPE, "steps=2", "data.source.tasks.game.environment.path=two_tasks.py:Crashing"),
        files=crashing,
    ).whole()
    for commit in committed(run.files):
        assert commit.metrics["task/game/samples/failed_fraction"] == 1.0
        assert commit.metrics["task/answers/samples/failed_fraction"] == 0.0
        batch = commit.refs["batch"].fetch_list(run.files.store, "task")
        assert set(map(str, batch)) == {"answers"} and len(batch) > 0
