"""Whole runs of SRPO: what is on record, kills, and the same rewards however episodes lie in shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.encoder import ProjectionEncoder
from engines.algorithms.progress_rewards import progress_rewards
from engines.encoders.encoder import Projection
from storage.audit.audit import audit
from storage.audit.lineage import of_sample
from storage.audit.samples import SampleOrigin
from storage.batches.columns import SampleStatus
from storage.objects.store import Store
from storage.runs.commit_log import Commit
from tests.engines.algorithms.test_progress_rewards import SETTINGS
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import ROOT, Launch, Launched

pytestmark = pytest.mark.cluster

WORDS = ("tiny-srpo", "steps=3")
BLIND = """
import numpy as np

from engines.encoders.encoder import Projection

plain = Projection.embed

def blind(self, frames):
    return plain(self, frames) * (np.nan if frames[-1].sum() == 255 * 4 * 3 * 2 else 1.0)

Projection.embed = blind
"""


def columns(commit: Commit, store: Store, *names: str) -> list[Any]:
    samples = commit.refs["samples"]
    return [samples.fetch_numpy(store, name)[0] for name in names]


def check(commit: Commit, store: Store) -> None:
    """Rewards are those of the stored embeddings, and embeddings those of the stored frames."""
    ids, given, rewards, points, first, status = columns(
        commit,
        store,
        *("sample_id", "score/environment", "reward", "embedding", "opening_frame", "status"),
    )
    frames = commit.refs["frames"]
    of, turn = (frames.fetch_numpy(store, name)[0] for name in ("sample_id", "turn"))
    seen = frames.fetch_numpy(store, "frame")[0]
    turns = commit.refs["samples"].lengths(store, "turn_rewards")
    encoder = Projection(ProjectionEncoder())
    known = status != SampleStatus.FAILED
    for row in np.flatnonzero(known):
        own = np.flatnonzero(of == ids[row])
        assert sorted(turn[own].tolist()) == list(range(turns[row])), "one of each turn"
        last = seen[own[turn[own].argmax()]] if len(own) else first[row]
        np.testing.assert_array_equal(points[row], encoder.embed([last]))
    order = np.flatnonzero(known)[np.argsort(ids[known], kind="stable")]
    one_task = np.zeros(len(order), np.int64)
    found = progress_rewards(points[order], given[order] == 1, one_task, **SETTINGS)
    np.testing.assert_array_equal(rewards[order], found.rewards.astype(np.float32))
    assert np.isnan(rewards[~known]).all()
    said = commit.refs["samples"].fetch_list(store, "extra/progress/measured")
    digest = encoder.digest(first[0])
    for place, row in enumerate(order):
        if (nearest := int(found.nearest[place])) >= 0:
            assert said[row]["encoder"] == digest and said[row]["cluster"] == nearest
    members = commit.refs["clusters"].fetch_list(store, "members")
    assert [one.tolist() for one in members] == [
        ids[order][one.members].tolist() for one in found.clusters
    ]


@pytest.mark.slow
def test_a_run_is_on_record(launch: Launch) -> None:
    run = launch(*WORDS, "steps=2", module="flows.srpo").whole()
    store = run.files.store
    for commit in run.commits():
        check(commit, store)
        assert 0 < commit.metrics["progress/success_rate"] < 1
        assert commit.metrics["time/embedding"] > 0 and commit.metrics["time/progress"] > 0
        ledger = commit.ledger
        assert ledger.drawn == ledger.trained + ledger.filtered
    assert audit(run.files).problems == [] and audit(run.files).orphans == []
    samples = run.commits()[0].refs["samples"]
    rewards = samples.fetch_numpy(store, "reward")[0]
    failure = int(np.flatnonzero(rewards < 1)[0])
    origin, _ = of_sample(run.files, int(samples.fetch_numpy(store, "sample_id")[0][failure]))
    assert isinstance(origin, SampleOrigin)
    measured = origin.extras["progress/measured"]
    frame = samples.fetch_numpy(store, "opening_frame")[0][0]
    assert measured["encoder"] == Projection(ProjectionEncoder()).digest(frame)
    assert measured["cluster"] >= 0
    assert origin.reward == origin.scores["progress"] == rewards[failure]
    assert origin.scores["environment"] == 0.0


@pytest.mark.slow
def test_a_run_killed_on_the_way_asks_no_encoder_twice(launch: Launch, tmp_path: Path) -> None:
    """The encoder's worker dies in an embedding, later the flow once a step is embedded."""
    whole = launch(*WORDS, "store.uri=file://whole", module="flows.srpo").whole()
    whole.store_uri = f"file://{tmp_path}/whole"
    encoder = Fault(
        id="encoder", target="engines.encoders.embedding:EncoderEngine.embed", action="kill", nth=2
    )
    flow = Fault(
        id="flow",
        target="tasks.progress_rewards.progress:shards_with",
        action="kill",
        nth=2,
        when="before",
    )
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [encoder, flow])
    broken = launch(*WORDS, module="flows.srpo", environment=faults.environment)
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    name = broken.files.run
    resumed = launch("--resume", name, module="flows.srpo")
    code, out = resumed.end()
    assert code == 0, out
    again = committed(resumed.files)
    assert story(again) == story(whole.commits())
    assert not [one for one in again[1].attempts if one["stage"] == "embedding"]
    assert audit(resumed.files).problems == []
    code, out = launch(name, "2", module="flows.replay").end()
    assert (code, "Equal, to the bit." in out) == (0, True), out
    for commit in again:
        check(commit, resumed.files.store)


@pytest.mark.slow
def test_rewards_are_the_same_for_one_shard_and_for_four(launch: Launch, tmp_path: Path) -> None:
    found: list[Launched] = []
    for number, shards in enumerate((1, 4)):
        uri = f"store.uri=file://{tmp_path}/{number}"
        run = launch(*WORDS, uri, f"rollout.shards={shards}", module="flows.srpo").whole()
        run.store_uri = f"file://{tmp_path}/{number}"
        found.append(run)
    one, four = ([commit.version_out.digest for commit in run.commits()] for run in found)
    assert one == four


@pytest.mark.slow
def test_an_episode_without_an_embedding_has_failed(launch: Launch, tmp_path: Path) -> None:
    """It has no reward, and its group goes by rewards.on_failure."""
    run = launch(
        *WORDS,
        "steps=2",
        "rewards.on_failure=complete",
        module="flows.srpo",
        files={"sitecustomize.py": BLIND},
        environment={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    code, out = run.end()
    assert code == 0, out
    store = run.files.store
    for commit in run.commits():
        points, rewards, status, given = columns(
            commit, store, "embedding", "reward", "status", "score/environment"
        )
        missing = ~np.isfinite(points).all(1)
        assert missing.any() and (status[missing] == SampleStatus.FAILED).all()
        assert np.isnan(rewards[missing]).all() and np.isfinite(given[missing]).all()
        trained = commit.refs["batch"].fetch_numpy(store, "sample_id")[0]
        (ids,) = columns(commit, store, "sample_id")
        assert not np.isin(ids[missing], trained).any()
