"""Whole runs on trees of completions: what is on record, kills, and the same trees for any workers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from storage.audit.audit import audit
from storage.objects.store import Store
from storage.runs.commit_log import Commit
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch, Launched

pytestmark = pytest.mark.cluster

WORDS = (
    "tiny",
    "tree.divergence={kind: drawn, fewest: 1, most: 3}",
    "group_size=5",
    "train.tree_training=true",
)


def check_trees(commit: Commit, store: Store) -> tuple[int, int]:
    """Nodes are stored once, samples are made of them; tokens of the nodes, and of the samples."""
    nodes, samples = commit.refs["nodes"], commit.refs["samples"]
    names = [nodes.fetch_numpy(store, name)[0].tolist() for name in ("group_id", "tree_node")]
    segments = nodes.fetch_list(store, "response_ids")
    by_node = dict(zip(zip(*names, strict=True), segments, strict=True))
    assert len(by_node) == len(nodes)
    paths, edges = samples.fetch_numpy(store, "tree_path")
    assert edges is not None
    groups = samples.fetch_numpy(store, "group_id")[0].tolist()
    for group, (start, stop), ids in zip(
        groups, pairwise(edges), samples.fetch_list(store, "response_ids"), strict=True
    ):
        own = [by_node[group, node] for node in paths[start:stop].tolist()]
        assert np.concatenate(own).tolist() == np.asarray(ids).tolist()
    drawn = sum(len(ids) for ids in segments)
    return drawn, int(samples.lengths(store, "response_ids").sum())


@pytest.mark.slow
def test_a_run_on_trees_is_on_record(launch: Launch) -> None:
    run = launch(*WORDS, "steps=1", "algorithm.advantage.prefix_weight=once", module="flows.tree")
    code, out = run.end()
    assert code == 0, out
    (commit,) = run.commits()
    store = run.files.store
    drawn, held = check_trees(commit, store)
    assert drawn < held and commit.metrics["rollout/tokens"] == drawn
    groups = commit.refs["samples"].fetch_numpy(store, "group_id")[0]
    assert np.unique(groups, return_counts=True)[1].tolist() == [5] * 4
    mask = commit.refs["batch"].fetch_numpy(store, "response_mask")[0]
    assert int(mask.sum()) == drawn, "a shared token trains once"
    batch = commit.refs["batch"]
    computed = commit.metrics["train/tokens"]
    whole = int((batch.lengths(store, "prompt_ids") + batch.lengths(store, "response_ids")).sum())
    prompts = int(batch.lengths(store, "prompt_ids").sum()) // 5
    assert computed <= prompts + drawn, "and is computed once"
    assert commit.metrics["train/tokens_saved"] == pytest.approx(1 - computed / (whole - 20))
    code, out = launch(run.files.run, "1", module="flows.replay").end()
    assert (code, "Equal, to the bit." in out) == (0, True), out
    assert audit(run.files).problems == []


@pytest.mark.slow
def test_a_run_on_trees_killed_on_the_way_ends_with_the_same_weights(
    launch: Launch, tmp_path: Path
) -> None:
    """An engine dies in a segment, later the flow between two levels of a tree."""
    whole = launch(*WORDS, "steps=3", "store.uri=file://whole", module="flows.tree")
    code, out = whole.end()
    assert code == 0, out
    whole.store_uri = f"file://{tmp_path}/whole"
    engine = Fault(
        id="engine", target="engines.rollout.hf_decoding:Decoding.step", action="kill", nth=30
    )
    # The 13th plan is inside a tree of the second step: each step has two shards of five plans.
    flow = Fault(id="flow", target="tasks.trees.tree:plan", action="kill", nth=13, when="after")
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [engine, flow])
    broken = launch(*WORDS, "steps=3", module="flows.tree", environment=faults.environment)
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    name = broken.files.run
    assert f"Go on with it by: refrain tree --resume {name}" in launch("--resume", name).end()[1]
    resumed = launch("--resume", name, module="flows.tree")
    code, out = resumed.end()
    assert code == 0, out
    assert story(committed(resumed.files)) == story(whole.commits())
    assert digests(resumed) == digests(whole)
    assert audit(resumed.files).problems == []
    for commit in resumed.commits():
        check_trees(commit, resumed.files.store)


@pytest.mark.slow
def test_trees_are_the_same_for_one_worker_and_for_three(launch: Launch, tmp_path: Path) -> None:
    found = []
    for number, words in enumerate(
        (
            ("rollout.shards=1",),
            ("cluster.pools.rollout.workers=3", "rollout.shards=4"),
        )
    ):
        uri = f"store.uri=file://{tmp_path}/{number}"
        run = launch(*WORDS, "steps=2", uri, *words, module="flows.tree")
        code, out = run.end()
        assert code == 0, out
        run.store_uri = f"file://{tmp_path}/{number}"
        found.append(run)
    assert digests(found[0]) == digests(found[1])


def digests(run: Launched) -> list[str]:
    """Of the weights after each step."""
    return [commit.version_out.digest for commit in run.commits()]
