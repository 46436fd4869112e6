"""A frozen version that plays against the policy, in the real flow."""

from __future__ import annotations

import shutil
import sys
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows import lineage, replay, samples
from storage.audit.audit import audit
from storage.batches.columns import Author
from storage.objects.store import Store
from storage.runs.commit_log import Commit, read_commit
from storage.runs.opponents import opponent_of
from storage.runs.run_store import RunStore
from tests.faults.ledger import committed
from tests.faults.planted import Fault
from tests.flows.conftest import CARRYING, Launch, Launched, ends_alike, starting
from tests.flows.test_players import SIGNALS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

WORDS = (
    *SIGNALS,
    "episodes.opponent.version=start",
    "steps=3",
    "store.keep_versions=1",
    "store.snapshot_every=3",
    "cluster.roles.opponent=frozen",
    "cluster.pools.frozen={workers: 1, threads: 1, slots: 5}",
    "name=opponent",
)


@pytest.fixture(scope="module")
def whole(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A run to which nothing happened."""
    with starting(tmp_path_factory.mktemp("opponent"), prefect_api) as start:
        return start(*WORDS).whole()


def rows_of(files: RunStore, commit: Commit) -> list[dict[str, Any]]:
    """The samples of a step, each with its columns."""
    ref = commit.refs["samples"]
    names = (
        *("sample_id", "group_id", "player", "frozen", "episode", "reward", "weights_digest"),
        *("worker", "prompt_ids", "response_ids", "rollout_logprobs", "author", "weight_spans"),
    )
    columns = {name: ref.fetch_list(files.store, name) for name in names}
    return [{name: columns[name][n] for name in names} for n in range(len(ref))]


def test_each_seat_has_the_tokens_of_its_own_version(whole: Launched) -> None:
    files, wrote = whole.files, 0
    first = opponent_of(files).weights
    assert first.version == 0
    for commit in committed(files):
        rows = rows_of(files, commit)
        assert len(rows) == 4 * 4 * 2
        for row in rows:
            assert row["frozen"] == (row["player"] != row["group_id"] % 2), "the policy in turn"
            versions = np.asarray(row["weight_spans"])[::3].tolist()
            assert versions in ([], [0 if row["frozen"] else commit.step - 1])
            if versions and row["frozen"]:
                wrote += 1
                assert row["weights_digest"] == first.digest
                assert row["worker"] == "frozen-0"
        own = [row["reward"] for row in rows if not row["frozen"]]
        assert commit.metrics["reward/mean"] == pytest.approx(np.mean(own))
        assert commit.metrics["samples/total"] == len(own)
        assert commit.metrics.get("staleness/max", 0.0) == 0.0
        trained = commit.refs["batch"].fetch_list(files.store, "frozen")
        assert trained and not any(trained)
    assert wrote > 10
    assert audit(files).problems == []
    assert 0 in files.versions(), "retention leaves it, whatever store.keep_versions"
    assert 1 not in files.versions()


def test_their_log_probs_are_those_of_the_frozen_weights(whole: Launched) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    files = whole.files
    last = committed(files)[-1]
    folder = Path(files.store.url(files.weights_key(0)).removeprefix("file://"))
    models = [
        AutoModelForCausalLM.from_pretrained(folder.parent / version, dtype=torch.float32)
        for version in ("v000000", "v000003")
    ]
    errors = []
    for row in rows_of(files, last):
        if not row["frozen"] or not len(row["response_ids"]):
            continue
        prompt, response = (np.asarray(row[name]) for name in ("prompt_ids", "response_ids"))
        ids = torch.tensor(np.concatenate([prompt, response])[None].astype(np.int64))
        own = np.asarray(row["author"]) == Author.POLICY
        for model in models:
            with torch.inference_mode():
                found = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            found = found.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
            errors.append(np.abs(found - np.asarray(row["rollout_logprobs"]))[own].max())
    frozen, trained = np.asarray(errors).reshape(-1, 2).T
    assert len(frozen) > 4
    assert frozen.max() < 1e-3
    assert trained.min() > 1e-2, "the policy is another one by now"


def test_commands_say_who_played(
    whole: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(whole.folder)
    files, commit = whole.files, whole.commits()[-1]
    row = next(row for row in rows_of(files, commit) if row["frozen"] and row["player"] == 1)
    number = str(row["sample_id"])
    monkeypatch.setattr(sys, "argv", ["samples", files.run, "--episode", number])
    assert samples.main() == 0
    shown = capsys.readouterr().out
    assert shown.count(f"played by the opponent {files.run}@0") == 1
    monkeypatch.setattr(sys, "argv", ["lineage", files.run, "--sample", number])
    assert lineage.main() == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{files.run}@0 wrote it, a frozen opponent" in said
    monkeypatch.setattr(sys, "argv", ["replay", files.run, "3", "--episodes"])
    assert replay.main() == 0
    assert "the environments say the same again" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["replay", files.run, "3"])
    assert replay.main() == 0


KILLS = {
    "opponent's worker": Fault(
        id="worker",
        target="engines.rollout.hf_engine:HFEngine._sample",
        only="frozen",
        nth=2,
        action="kill",
    ),
    "flow after an opponent's turn": Fault(
        id="flow",
        target="tasks.episodes:opponents_turn",
        nth=2,
        action="kill",
        when="after",
    ),
}


@pytest.mark.parametrize("who", KILLS)
def test_killed_in_mid_episode(launch: Launch, whole: Launched, tmp_path: Path, who: str) -> None:
    ends_alike(whole, launch, tmp_path, WORDS, KILLS[who])


def test_a_version_of_another_run_has_one_seat(
    launch: Launch, whole: Launched, tmp_path: Path
) -> None:
    """It stays in the other run's store; all else of the run is as against the first version."""
    shutil.copytree(whole.folder / ".refrain/store", tmp_path / "store")
    store, other = Store(f"file://{tmp_path}/store"), whole.files.run
    run = launch(
        *WORDS,
        f"store.uri={store.uri}",
        f"episodes.opponent.version={other}@3",
        "episodes.opponent.policy_plays=1",
        "seed=1",
        "steps=1",
    )
    code, out = run.end()
    assert code == 0, out
    (name,) = [one for one in store.children() if one != other]
    files = RunStore(store, name)
    assert str(opponent_of(files)) == f"{other}@3"
    rows = rows_of(files, read_commit(files, 1))
    of_players = {p: [*g] for p, g in groupby(sorted(rows, key=key), key=key)}
    assert not any(row["frozen"] for row in of_players[1])
    assert {row["weight_spans"][0] for row in of_players[0]} == {3}
    assert audit(files).problems == []
    assert audit(RunStore(store, other)).problems == []


def key(row: dict[str, Any]) -> int:
    return int(row["player"])


def test_unfinished_episodes_are_carried(launch: Launch) -> None:
    """Steps that do not wait: what the opponent has begun goes on in the next step."""
    run = launch(*WORDS, *CARRYING)
    code, out = run.end()
    assert code == 0, out
    commits = committed(run.files, max_staleness=2)
    assert any(commit.carried for commit in commits)
    for before, commit in pairwise(commits):
        rows = rows_of(run.files, commit)
        assert len(rows) == 4 * 4 * 2
        assert {
            row["weight_spans"][0] for row in rows if row["frozen"] and len(row["weight_spans"])
        } <= {0}
        assert all(row["episode"] for row in rows)
        assert commit.metrics["staleness/max"] <= 2
        assert before.step == commit.step - 1
    assert audit(run.files).problems == []


@pytest.mark.parametrize("flow", ["dapo", "distill"])
def test_its_samples_do_not_train_in_other_flows(launch: Launch, flow: str) -> None:
    """Neither does dynamic sampling count them, nor do teachers' columns bring them in."""
    teacher = (
        "teachers.tutor.model={kind: random, layers: 2, hidden_size: 128, heads: 4, seed: 7}",
        "teachers.tutor.model.max_positions=256",
    )
    words = teacher if flow == "distill" else ("dynamic_sampling.max_rounds=2",)
    run = launch(*WORDS, *words, "steps=2", "store.snapshot_every=2", module=f"flows.{flow}")
    code, out = run.end()
    assert code == 0, out
    files, trained = run.files, 0
    for commit in committed(files):
        samples, batch = commit.refs["samples"], commit.refs.get("batch")
        frozen = samples.fetch_list(files.store, "frozen")
        assert 0 < sum(frozen) < len(frozen)  # type: ignore[arg-type]
        if batch is not None:
            assert not any(batch.fetch_list(files.store, "frozen"))
            trained += len(batch)
    assert trained
    assert audit(files).problems == []
