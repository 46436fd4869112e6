"""Episodes in the real flow: every turn stored, whoever dies, and nothing stepped twice."""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient

from configs.data import FunctionSource
from engines.episodes.episode_rows import seed_of
from examples.guessing import Guessing
from flows import replay, samples
from storage.audit.audit import audit
from storage.audit.samples import tokenizer_of
from storage.batches.columns import Author, SampleStatus
from storage.prompts.datasets import open_source
from storage.runs.commit_log import Commit
from storage.runs.run_store import RunStore
from tests.faults.ledger import committed
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
    "steps=3",
    "store.snapshot_every=1",
    "rollout.deadline=30",
    "cluster.no_workers_timeout=40",
    "name=episodes",
)
UNRELIABLE = """
import time
from examples.guessing import Guessing

class Unreliable(Guessing):
    def reset(self, seed=0, **row):
        self.seed = seed
        return super().reset(seed, **row)

    def step(self, text):
        if self.seed % 6 == 0:
            raise RuntimeError("the game server is down")
        if self.seed % 6 == 1:
            time.sleep(600)
        return super().step(text)

    def get_reward(self):
        return float("nan") if self.seed % 6 == 2 else super().get_reward()
"""

TELLING = """
from examples.guessing import Guessing

class Telling(Guessing):
    def __init__(self, log, **params):
        super().__init__(**params)
        self.log = log

    def reset(self, seed=0, **row):
        self.seed = seed
        return super().reset(seed, **row)

    def get_reward(self):
        with open(self.log, "a") as told:
            print(self.seed, super().get_reward(), file=told)
        return super().get_reward()
"""

SLEEPING = """
import time
from examples.guessing import Guessing

class Sleeping(Guessing):
    begun = False

    def __init__(self, log, **params):
        super().__init__(**params)
        self.log = log

    def told(self, change):
        with open(self.log, "a") as log:
            print(change, file=log)

    def step(self, text):
        if not self.begun:
            self.begun = True
            self.told(1)
        time.sleep(0.02)
        return super().step(text)

    def get_reward(self):
        self.told(-1 if self.begun else 0)
        return super().get_reward()
"""


@pytest.fixture(scope="module")
def whole(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A run to which nothing happened."""
    with starting(tmp_path_factory.mktemp("episodes"), prefect_api) as start:
        return start(*WORDS).whole()


def rows(files: RunStore, commit: Commit, *names: str) -> list[tuple[Any, ...]]:
    """Columns of the samples of a step, a row each."""
    samples = commit.refs["samples"]
    columns = [samples.fetch_list(files.store, name) for name in names]
    return list(zip(*columns, strict=True))


def texts(files: RunStore, commit: Commit, ids: np.ndarray, authors: np.ndarray) -> list[str]:
    """What was written, author by author in turn."""
    words, found, place = tokenizer_of(files, (commit.version_out,)), [], 0
    for _, run in groupby(authors.tolist()):
        stop = place + len(list(run))
        found.append(words.decode(ids[place:stop].tolist()))
        place = stop
    return found


def test_each_turn_is_stored_with_its_author(whole: Launched) -> None:
    files = whole.files
    seen = 0
    for commit in committed(files):
        for ids, authors, mask, spans, turns, seed, reward, ended, status in rows(
            files,
            commit,
            *("response_ids", "author", "response_mask", "weight_spans", "turn_ids"),
            *("env_seed", "reward", "episode", "status"),
        ):
            policy = authors == Author.POLICY
            assert (mask == policy).all()
            covered = np.zeros(len(ids), bool)
            for _, start, stop in spans.reshape(-1, 3):
                covered[start:stop] = True
            assert (covered == policy).all(), "a version for each token that the policy wrote"
            said = texts(files, commit, ids, authors)
            game = Guessing()
            game.reset(seed=int(seed))
            if ended != "done":  # a turn was too long
                assert (ended, status, reward) == ("turn_tokens", SampleStatus.TRUNCATED, 0.0)
                continue
            seen += 1
            first, answer, second = said
            assert answer == game.step(first)
            game.step(second)
            assert game.get_reward() == reward
            assert turns.tolist() == [0] * int(len(ids) - policy[::-1].argmin()) + [1] * int(
                policy[::-1].argmin()
            )
    assert seen > 10
    assert audit(files).problems == []


def test_what_is_counted(whole: Launched) -> None:
    for commit in whole.commits():
        metrics = commit.metrics
        assert metrics["episode/turns_max"] == 2
        assert 0 < metrics["episode/ended_by_done"] <= 1
        assert metrics["response/tokens_max"] <= 24, "what the policy wrote alone"
        assert metrics["time/environment"] > 0
        assert metrics["episode/drift"] == 0


def test_commands_show_the_turns(
    whole: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(whole.folder)
    monkeypatch.setattr(sys, "argv", ["samples", whole.files.run, "--best"])
    assert samples.main() == 0
    out = capsys.readouterr().out
    assert "was answered\n=" in out
    assert re.search(r"episode ended: (done|turn_tokens), rewards by turn [-\d]", out)
    monkeypatch.setattr(sys, "argv", ["replay", whole.files.run, "2", "--episodes"])
    assert replay.main() == 0
    assert "the environments say the same again" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("drive", ["together", "apart"])
def test_greedy_baselines_and_the_evaluation_are_episodes_too(
    launch: Launch, tmp_path: Path, drive: str
) -> None:
    run = launch(
        *WORDS,
        f"episodes.drive={drive}",
        "steps=1",
        "episodes.environment.path=telling.py:Telling",
        f"episodes.environment.params.log={tmp_path}/told",
        "algorithm.advantage.kind=remax",
        "evaluation.source.kind=function",
        f"evaluation.source.path={EXAMPLE}.py:rows",
        "evaluation.source.params.size=6",
        "evaluation.rows=6",
        "promotion.alias=champion",
        files={"telling.py": TELLING},
    )
    code, out = run.end()
    assert code == 0, out
    files = run.files
    (commit,) = committed(files)
    store, greedy, trained = files.store, commit.refs["baselines"], commit.refs["batch"]
    assert len(greedy) == 4, "one episode a prompt"
    rewards = dict(
        zip(*(greedy.fetch_list(store, name) for name in ("group_id", "reward")), strict=True)
    )
    for group, reward in zip(
        *(trained.fetch_list(store, name) for name in ("group_id", "baseline_reward")), strict=True
    ):
        assert reward == rewards[group]
    assert audit(files).problems == []

    source = FunctionSource(path=f"{EXAMPLE}.py:rows", params={"size": 6})
    seeds = {seed_of(0, row, open_source(source).digest) for row in range(6)}
    told = dict(line.split() for line in (run.folder / "told").read_text().splitlines())
    won = [float(reward) for seed, reward in told.items() if int(seed) in seeds]
    assert len(won) == 6, "held-out rows have seeds of their own"
    client = MlflowClient(f"sqlite:///{run.folder}/.refrain/mlflow.db")
    champion = client.get_model_version_by_alias("episodes", "champion")
    measured = client.get_run(champion.run_id).data.metrics["eval/held_out/reward"]
    assert measured == pytest.approx(sum(won) / 6)


@pytest.mark.slow
def test_an_agent_that_asks_the_model_trains_it_alike(
    launch: Launch, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The example's agent plays the game of its environment: the same turns, the same weights, where
    each turn is drawn as the answer to a request."""
    with starting(tmp_path_factory.mktemp("class"), prefect_api) as start:
        whole = start(*WORDS, "episodes.past_turns=as_rendered").whole()
    run = launch(
        *WORDS,
        "episodes.environment.kind=agent",
        f"episodes.environment.path={EXAMPLE}.py:ask",
    ).whole()
    assert run.commits()[-1].version_out.digest == whole.commits()[-1].version_out.digest
    assert audit(run.files).problems == []


@pytest.mark.slow
def test_an_environment_that_fails_is_no_reward(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It raises, hangs, or gives a reward that is no number; those beside it are played to the end."""
    run = launch(
        *WORDS,
        "steps=1",
        "prompts_per_step=12",
        "group_size=2",
        "episodes.environment.path=unreliable.py:Unreliable",
        "episodes.turn_timeout=2",
        "episodes.max_turn_tokens=24",
        "rewards.on_failure=drop",
        files={"unreliable.py": UNRELIABLE},
    )
    code, out = run.end()
    assert code == 0, out
    (commit,) = committed(run.files)
    causes = ("the game server is down", "episodes.turn_timeout = 2 s", "nan")
    seen = [0, 0, 0, 0]
    for seed, status, reward, ended, error in rows(
        run.files, commit, "env_seed", "status", "reward", "episode", "episode_error"
    ):
        if ended == "turn_tokens":  # it may never have come to a step
            continue
        kind = min(seed % 6, 3)
        seen[kind] += 1
        if kind == 3:
            assert status == SampleStatus.OK
            assert reward in (0.0, 1.0)
        else:
            assert causes[kind] in error
            assert ended == ("turn_seconds" if kind == 1 else "failed")
            assert status == SampleStatus.FAILED
            assert np.isnan(reward)
    assert all(seen)
    assert commit.metrics["episode/ended_by_turn_seconds"] == seen[1] / 24
    assert commit.ledger.dropped["reward_failed"] >= sum(seen[:3]) / 2
    monkeypatch.chdir(run.folder)
    words = ["samples", run.files.run, "--failed", "--limit", "99", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    assert samples.main() == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown) == sum(seen[:3])
    for one in shown:
        hung = causes[1] in one["episode_error"]
        assert one["episode_end"] == ("turn_seconds" if hung else "failed")
        assert any(it in one["episode_error"] for it in causes)
        assert one["reward"] is None


@pytest.mark.slow
def test_256_sleeping_episodes_under_a_limit_of_16(launch: Launch, tmp_path: Path) -> None:
    run = launch(
        *WORDS,
        "steps=1",
        "prompts_per_step=64",
        "rollout.shards=64",
        "episodes.at_once=16",
        "episodes.environment.path=sleeping.py:Sleeping",
        f"episodes.environment.params.log={tmp_path}/told",
        files={"sleeping.py": SLEEPING},
    )
    code, out = run.end()
    assert code == 0, out
    (commit,) = committed(run.files)
    changes = np.array([int(line) for line in (tmp_path / "told").read_text().split()])
    played = np.cumsum(changes)
    assert len(commit.refs["samples"]) == 256
    assert (changes < 1).sum() == 256, "each ends once"
    assert 8 <= played.max() <= 16
    assert played[-1] == 0


STEPPED = "engines.environments.sessions:Environments.act"
KILLS = {
    "environment": Fault(
        id="environment", target="engines.environments.child:Sessions.answer", nth=9, action="kill"
    ),
    "environments' worker": Fault(id="worker", target=STEPPED, nth=3, action="kill", when="after"),
    "engine": Fault(
        id="engine", target="engines.rollout.engine:RolloutEngine.generate", nth=5, action="kill"
    ),
    "flow after a turn": Fault(id="flow", target="tasks.episodes:answer", nth=4, action="kill"),
    "flow before its record": Fault(
        id="record", target="tasks.episodes:together", nth=6, action="kill"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
def test_killed_in_mid_episode(launch: Launch, whole: Launched, tmp_path: Path, who: str) -> None:
    ends_alike(whole, launch, tmp_path, WORDS, KILLS[who])


@pytest.mark.slow
def test_unfinished_episodes_are_carried(launch: Launch) -> None:
    """Steps that do not wait: what an episode has said stands when it goes on in the next step."""
    run = launch(*WORDS, *CARRYING)
    code, out = run.end()
    assert code == 0, out
    commits = committed(run.files, max_staleness=2)
    assert any(commit.carried for commit in commits)
    for commit in commits:
        for authors, ended in rows(run.files, commit, "author", "episode"):
            assert ended
            assert authors[0] == Author.POLICY


def test_settings_that_cannot_be(launch: Launch) -> None:
    code, out = launch("tiny", "rewards.functions=[{kind: environment}]", "--check").end()
    assert code == 2
    assert "episodes = null has none. Set episodes.environment" in out
    tools = "episodes.environment={kind: tools, functions: ['json:dumps']}"
    code, out = launch("tiny", "rewards.functions=[{kind: environment}]", tools, "--check").end()
    assert code == 2
    assert "functions give none. Set episodes.environment.kind = class" in out
