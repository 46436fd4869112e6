"""Self-play in the real flow: a sample for each player, an entry of the ledger for each prompt."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from examples.signals import Signals
from flows import replay, samples
from storage.audit.audit import audit
from storage.audit.samples import tokenizer_of
from storage.batches.columns import Author
from storage.runs.commit_log import Commit
from storage.runs.run_store import RunStore
from tests.faults.ledger import committed
from tests.faults.planted import Fault
from tests.flows.conftest import CARRYING, ROOT, Launch, Launched, ends_alike, starting

pytestmark = pytest.mark.cluster

EXAMPLE = ROOT / "examples/signals"
SIGNALS = (
    f"{EXAMPLE}.yaml",
    f"episodes.environment.path={EXAMPLE}.py:Signals",
    f"data.source.path={EXAMPLE}.py:rows",
    "prompts_per_step=4",
    "group_size=4",
    "rollout.shards=2",
    "rollout.deadline=30",
    "cluster.no_workers_timeout=40",
)
WORDS = (*SIGNALS, "steps=2", "store.snapshot_every=1", "name=players")


@pytest.fixture(scope="module")
def whole(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A run to which nothing happened."""
    with starting(tmp_path_factory.mktemp("players"), prefect_api) as start:
        return start(*WORDS).whole()


def parts(files: RunStore, commit: Commit, row: dict[str, object]) -> list[tuple[int, str]]:
    """Who wrote what in a sample, in turn."""
    words, found, place = tokenizer_of(files, (commit.version_out,)), [], 0
    ids, authors = np.asarray(row["response_ids"]), np.asarray(row["author"])
    for author, run in groupby(authors.tolist()):
        stop = place + len(list(run))
        found.append((author, words.decode(ids[place:stop].tolist())))
        place = stop
    return found


@pytest.mark.slow
def test_each_player_has_a_sample_of_its_own(whole: Launched) -> None:
    files = whole.files
    played = 0
    for commit in committed(files):
        ref = commit.refs["samples"]
        names = (
            *("sample_id", "group_id", "player", "episode_id", "env_seed", "episode", "reward"),
            *("response_ids", "author", "response_mask", "weight_spans", "prompt_ids"),
        )
        columns = {name: ref.fetch_list(files.store, name) for name in names}
        rows = [{name: columns[name][n] for name in names} for n in range(len(ref))]
        assert len(rows) == 4 * 4 * 2
        assert len(commit.refs["prompts"]) == 4
        by_episode: dict[object, list[dict[str, object]]] = {}
        for row in rows:
            by_episode.setdefault(row["episode_id"], []).append(row)
        assert all([row["player"] for row in two] == [0, 1] for two in by_episode.values())
        for sender, guesser in by_episode.values():
            for row in (sender, guesser):
                own = np.asarray(row["author"]) == Author.POLICY
                assert (np.asarray(row["response_mask"]) == own).all()
                covered = np.zeros(len(own), bool)
                for _, start, stop in np.asarray(row["weight_spans"]).reshape(-1, 3):
                    covered[start:stop] = True
                assert (covered == own).all()
            assert sender["episode"] == guesser["episode"]
            if sender["episode"] != "done":  # a turn was too long
                continue
            played += 1
            game = Signals()
            game.reset(seed=int(str(sender["env_seed"])))
            [(_, sign)] = parts(files, commit, sender)
            [(by, told), (_, guess)] = parts(files, commit, guesser)
            assert (by, told) == (Author.ENVIRONMENT, game.step(sign, 0)[1])
            assert game.step(guess, 1) == (None, None, None, True)
            assert [sender["reward"], guesser["reward"]] == game.get_reward()
    assert played > 5
    assert audit(files).problems == []


@pytest.mark.slow
def test_the_ledger_has_prompts_and_baselines_have_players(whole: Launched) -> None:
    files = whole.files
    commits = committed(files)
    assert commits[-1].ledger.drawn == 8
    assert commits[-1].ledger.trained == 8
    for commit in commits:
        assert commit.metrics["episode/turns_max"] == 1
        batch = commit.refs["batch"]
        groups, rewards = batch.own_groups(files.store), batch.fetch_numpy(files.store, "reward")[0]
        advantages, offsets = batch.fetch_numpy(files.store, "advantages")
        masks, _ = batch.fetch_numpy(files.store, "response_mask")
        assert offsets is not None
        assert 4 < len(np.unique(groups)) <= 8, "a player without a turn is not trained"
        for group in np.unique(groups):
            of_group = np.flatnonzero(groups == group)
            for row in of_group:
                own = advantages[offsets[row] : offsets[row + 1]]
                wrote = masks[offsets[row] : offsets[row + 1]].astype(bool)
                apart = rewards[row] - rewards[of_group].mean()
                assert (np.sign(np.round(own[wrote], 6)) == np.sign(np.round(apart, 6))).all()
                assert not own[~wrote].any()


@pytest.mark.slow
def test_commands_show_both_players(
    whole: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(whole.folder)
    commit = whole.commits()[-1]
    store, ref = whole.files.store, commit.refs["samples"]
    ids = np.stack([ref.fetch_numpy(store, one)[0] for one in ("sample_id", "episode_id")])
    sample, episode = ids[:, ids[0] != ids[1]][:, 0].tolist()  # a sample of player 1
    monkeypatch.setattr(sys, "argv", ["samples", whole.files.run, "--episode", str(sample)])
    assert samples.main() == 0
    shown = capsys.readouterr().out
    assert f"Sample {episode} (player 0 of {episode})" in shown
    assert f"Sample {sample} (player 1 of {episode})" in shown
    monkeypatch.setattr(sys, "argv", ["replay", whole.files.run, "2", "--episodes"])
    assert replay.main() == 0
    shown = capsys.readouterr().out
    assert "16 episodes of" in shown
    assert "the environments say the same again" in shown


KILLS = {
    "environments' worker": Fault(
        id="worker",
        target="engines.environments.sessions:Environments.act",
        nth=2,
        action="kill",
        when="after",
    ),
    "flow after a turn": Fault(id="flow", target="tasks.episodes:answer", nth=3, action="kill"),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
def test_killed_in_mid_episode(launch: Launch, whole: Launched, tmp_path: Path, who: str) -> None:
    ends_alike(whole, launch, tmp_path, WORDS, KILLS[who])


@pytest.mark.slow
def test_greedy_baselines_and_the_evaluation_have_all_players(launch: Launch) -> None:
    run = launch(
        *WORDS,
        "steps=1",
        "algorithm.advantage.kind=remax",
        "evaluation.source.kind=function",
        f"evaluation.source.path={EXAMPLE}.py:rows",
        "evaluation.source.params.size=6",
        "evaluation.rows=6",
        "promotion.alias=champion",
    )
    code, out = run.end()
    assert code == 0, out
    (commit,) = committed(run.files)
    store, greedy, trained = run.files.store, commit.refs["baselines"], commit.refs["batch"]
    assert len(greedy) == 4 * 2, "one episode a prompt"
    names = ("group_id", "player")
    rewards = dict(
        zip(
            zip(*(greedy.fetch_list(store, name) for name in names), strict=True),
            greedy.fetch_list(store, "reward"),
            strict=True,
        )
    )
    of_samples = zip(*(trained.fetch_list(store, name) for name in names), strict=True)
    compared = trained.fetch_list(store, "baseline_reward")
    assert [rewards[one] for one in of_samples] == compared
    assert audit(run.files).problems == []


@pytest.mark.slow
def test_unfinished_episodes_are_carried(launch: Launch) -> None:
    """Steps that do not wait: who waits for another player goes on waiting in the next step."""
    run = launch(*WORDS, *CARRYING)
    code, out = run.end()
    assert code == 0, out
    commits = committed(run.files, max_staleness=2)
    assert any(commit.carried for commit in commits)
    for commit in commits:
        ref = commit.refs["samples"]
        columns = [ref.fetch_list(run.files.store, name) for name in ("group_id", "player")]
        seats = list(zip(*columns, strict=True))
        assert len(seats) == 4 * 4 * 2
        assert all(seats.count(seat) == 4 for seat in seats)
        assert all(ref.fetch_list(run.files.store, "episode"))
    assert audit(run.files).problems == []
