"""Episodes that are played each by itself: the samples that playing them together gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage.audit.audit import audit
from storage.batches.columns import SampleStatus
from storage.runs.commit_log import Commit
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault
from tests.flows.conftest import CARRYING, ROOT, Launch, Launched, ends_alike, starting

pytestmark = pytest.mark.cluster

EXAMPLE = ROOT / "examples/guessing"
WORDS = (
    f"{EXAMPLE}.yaml",
    f"episodes.environment.path={EXAMPLE}.py:Guessing",
    f"data.source.path={EXAMPLE}.py:rows",
    "prompts_per_step=4",
    "group_size=4",
    "rollout.shards=2",
    "steps=2",
    "store.snapshot_every=1",
    "rollout.deadline=30",
    "cluster.no_workers_timeout=40",
    "name=episodes",
)
APART = (*WORDS, "episodes.drive=apart")
# What differs between two runs of the same seeds.
OF_THE_RUN = {"worker", "attempt", "env_seconds"}


@pytest.fixture(scope="module")
def whole(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A run whose episodes are played together, and to which nothing happened."""
    with starting(tmp_path_factory.mktemp("together"), prefect_api) as start:
        return start(*WORDS).whole()


def columns(run: Launched, commit: Commit) -> dict[str, list[object]]:
    """The samples of a step, as far as they are the same in every run."""
    samples = commit.refs["samples"]
    return {
        name: samples.fetch_list(run.files.store, name)
        for name in sorted(samples.names)
        if name not in OF_THE_RUN
    }


def same_samples(one: Launched, other: Launched) -> None:
    """Of all steps, column by column."""
    for a, b in zip(one.commits(), other.commits(), strict=True):
        first, second = columns(one, a), columns(other, b)
        assert first.keys() == second.keys()
        for name, values in first.items():
            for left, right in zip(values, second[name], strict=True):
                np.testing.assert_array_equal(left, right, err_msg=name)  # NaN is itself


@pytest.mark.slow
def test_the_samples_are_those_of_playing_them_together(whole: Launched, launch: Launch) -> None:
    run = launch(*APART).whole()
    assert story(committed(run.files)) == story(whole.commits())
    same_samples(whole, run)
    assert audit(run.files).problems == []
    for commit in run.commits():
        calls = [one for one in commit.attempts if one["stage"] == "rollout"]
        assert len(calls) > 16, "a call for each turn of each episode"
        assert commit.metrics["episode/at_once"] == 1024
        (key,) = {
            key.rpartition("/")[0] for key in commit.refs["samples"][["response_ids"]].objects
        }
        assert key.endswith("/gather")
        assert not run.files.store.children(f"{run.files.step_key(commit.step)}/episode")


KILLS = {
    "environment": Fault(
        id="environment", target="engines.environments.child:Sessions.answer", nth=9, action="kill"
    ),
    "environments' worker": Fault(
        id="worker",
        target="engines.environments.sessions:Environments.act",
        nth=9,
        action="kill",
        when="after",
    ),
    "engine": Fault(
        id="engine", target="engines.rollout.engine:RolloutEngine.generate", nth=17, action="kill"
    ),
    "flow after some episodes": Fault(
        id="episodes", target="tasks.episodes:discard", nth=5, action="kill"
    ),
    "flow before they are gathered": Fault(
        id="gather", target="tasks.episodes:join_stats", nth=1, action="kill"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
def test_killed_in_mid_episode(launch: Launch, whole: Launched, tmp_path: Path, who: str) -> None:
    run = ends_alike(whole, launch, tmp_path, APART, KILLS[who])
    same_samples(whole, run)
    if who == "flow after some episodes":
        first = run.commits()[0]
        turn_ids = first.refs["samples"].fetch_list(run.files.store, "turn_ids")
        turns = sum(int(np.max(one)) + 1 for one in turn_ids)  # type: ignore[call-overload]
        calls = [one for one in first.attempts if one["stage"] == "rollout"]
        assert 0 < len(calls) <= turns - 4, "those that were over are not played again"


@pytest.mark.slow
def test_unfinished_episodes_are_carried(launch: Launch) -> None:
    """Of a group that is cut some episodes are over, some go on, and some have not begun."""
    run = launch(*APART, *CARRYING, "episodes.at_once=6").whole()
    commits = committed(run.files, max_staleness=2)
    assert any(commit.carried for commit in commits)
    begun = [commit.refs["begun"] for commit in commits if "begun" in commit.refs]
    lengths = np.concatenate([one.lengths(run.files.store, "response_ids") for one in begun])
    assert (lengths > 0).any()
    for commit in commits:
        samples = commit.refs["samples"]
        assert all(samples.fetch_list(run.files.store, "episode"))
    assert audit(run.files).problems == []


@pytest.mark.slow
def test_the_turns_of_an_episode_go_to_the_engine_that_has_its_prefix(launch: Launch) -> None:
    """Each shard is one episode, so the calls of a shard are those of an episode."""
    run = launch(
        *APART,
        "prompts_per_step=8",
        "group_size=1",
        "rollout.shards=8",
        "steps=1",
        "episodes.max_turns=4",
        "episodes.full_turn=counts",
        "episodes.max_turn_tokens=4",
        "algorithm.advantage={kind: reinforce}",
        "algorithm.selection=[]",
        "cluster.pools.rollout.workers=2",
    ).whole()
    (commit,) = run.commits()
    workers: dict[object, list[object]] = {}
    for one in commit.attempts:
        if one["stage"] == "rollout":
            workers.setdefault(one["shard"], []).append(one["worker"])
    assert len(workers) == 8
    assert sum(map(len, workers.values())) >= 16
    assert all(len(set(names)) == 1 for names in workers.values()), workers
    assert len({names[0] for names in workers.values()}) == 2, "both engines play"


SLOW = """
import time

class Slow:
    def reset(self, **row):
        return ""

    def step(self, text):
        time.sleep(20)
        return "+:"

    def get_reward(self):
        return 1.0
"""


@pytest.mark.slow
def test_an_episode_takes_longer_than_any_call_may(launch: Launch) -> None:
    """Its environment works for longer than rollout.deadline, and it ends by a deadline of its own."""
    run = launch(
        *APART,
        "prompts_per_step=2",
        "group_size=2",
        "rollout.shards=1",
        "rollout.deadline=15",
        "steps=1",
        "episodes.environment.path=slow.py:Slow",
        "episodes.processes=4",
        "episodes.max_turns=5",
        "episodes.max_turn_tokens=4",
        "episodes.full_turn=counts",
        "episodes.turn_timeout=60",
        "episodes.deadline=35",
        "algorithm.advantage={kind: reinforce}",
        "algorithm.selection=[]",
        files={"slow.py": SLOW},
    ).whole()
    (commit,) = run.commits()
    samples = commit.refs["samples"]
    assert samples.fetch_list(run.files.store, "episode") == ["deadline"] * 4
    assert samples.fetch_list(run.files.store, "status") == [SampleStatus.OK] * 4
    assert samples.fetch_list(run.files.store, "reward") == [1.0] * 4
    assert [len(one) for one in samples.fetch_list(run.files.store, "observations")] == [2] * 4
    assert not [one for one in commit.attempts if one["error"]]


SIGNALS = ROOT / "examples/signals"
PLAYERS = (
    f"{SIGNALS}.yaml",
    f"episodes.environment.path={SIGNALS}.py:Signals",
    f"data.source.path={SIGNALS}.py:rows",
    "prompts_per_step=3",
    "group_size=4",
    "rollout.shards=2",
    "steps=2",
    "name=players",
)


@pytest.mark.slow
@pytest.mark.parametrize("opponent", [(), ("episodes.opponent.version=start",)])
def test_players_stay_together(prefect_api: str, tmp_path: Path, opponent: tuple[str, ...]) -> None:
    runs = []
    for drive in ("together", "apart"):
        folder = tmp_path / drive
        folder.mkdir()
        with starting(folder, prefect_api) as start:
            runs.append(start(*PLAYERS, *opponent, f"episodes.drive={drive}").whole())
    same_samples(*runs)
    assert audit(runs[1].files).problems == []
