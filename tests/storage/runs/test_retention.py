"""What a sweep removes, and that it never takes what a kept commit needs."""

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch

from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects import documents
from storage.objects.store import Store
from storage.runs.adapters import base_key, find_base
from storage.runs.commit_log import Commit, commit, head, read_commit
from storage.runs.retention import sweep
from storage.runs.run_store import RunStore
from storage.runs.snapshots import mark, snapshots
from storage.runs.weights import (
    FORMAT,
    MANIFEST,
    Adapter,
    BaseVersion,
    WeightsRef,
    open_manifest_at,
    stream,
)
from storage.runs.weights_writing import publish


def step_of(
    run: RunStore, step: int, also: BatchRef | None = None, base: WeightsRef | None = None
) -> WeightsRef:
    """A step as the flow makes it: samples of two shards, weights, a commit."""
    shards = []
    for shard in range(2):
        key = run.stage_key(step, "rollout", shard, "k")
        shards.append(write_batch(run.store, key, {"reward": [float(step), shard]}))
        run.finish(key, {"ref": shards[-1].to_json()})
    refs = {"batch": BatchRef.concat(shards)}
    if also is not None:
        refs["carried"] = also
    out = based_on(run, publish_version(run, step), base)
    before = read_commit(run, step - 1).version_out if step > 1 else publish_version(run, 0)
    commit(run, Commit(step=step, parent=step - 1, refs=refs, version_in=before, version_out=out))
    return out


def based_on(run: RunStore, ref: WeightsRef, base: WeightsRef | None) -> WeightsRef:
    """A version whose manifest says that it cannot be read without another one."""
    if base is None:
        return ref
    said = {"base": BaseVersion(key=base.key, digest=base.digest)}
    manifest = open_manifest_at(run.store, ref.key).model_copy(update=said)
    body = manifest.model_dump(mode="json")
    run.store.write(f"{ref.key}/{MANIFEST}", documents.encode(FORMAT, body))
    return ref.model_copy(update=said)


def publish_version(run: RunStore, version: int) -> WeightsRef:
    return publish(
        run.store,
        run.run,
        version,
        [("w", torch.full((4,), float(version)))],
        {"config.json": b"{}"},
    )


def snapshot_of(run: RunStore, step: int) -> None:
    run.store.write(f"{run.state_key(step)}/0.distcp", b"state")
    mark(run, step)


def versions(run: RunStore) -> list[int]:
    return [int(name[1:]) for name in run.store.children(f"{run.run}/weights")]


@pytest.fixture
def swept(run: RunStore) -> RunStore:
    for step in range(1, 11):
        step_of(run, step)
        if step in (3, 6, 9):
            snapshot_of(run, step)
    return run


def all_is_there(run: RunStore, steps: range) -> None:
    """Everything that a rebuild from the kept snapshots needs can be read."""
    for step in steps:
        for ref in read_commit(run, step).refs.values():
            ref.verify(run.store)
    last = read_commit(run, steps[-1])
    for ref in (last.version_in, last.version_out):
        list(stream(run.store, ref))


def test_what_stays_and_what_goes(swept: RunStore) -> None:
    removed = sweep(swept, keep_versions=2, keep_steps=2, keep_snapshots=2, tagged={4})
    assert versions(swept) == [0, 4, 6, 9, 10]
    assert snapshots(swept) == [6, 9]
    kept_steps = [s for s in range(1, 11) if len(swept.store.list(swept.step_key(s))) > 1]
    assert kept_steps == [7, 8, 9, 10]  # after snapshot 6, though only 2 were asked for
    all_is_there(swept, range(7, 11))
    assert all(swept.store.exists(swept.commit_key(step)) for step in range(1, 11))
    assert not any(swept.store.exists(key) for key in removed)
    assert len(removed) == len(set(removed)) > 20
    assert sweep(swept, keep_versions=2, keep_steps=2, keep_snapshots=2, tagged={4}) == []


def test_markers_go_first(swept: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: list[list[str]] = []
    delete = Store.delete

    def noting(store: Store, keys: list[str]) -> None:
        deleted.append(list(keys))
        delete(store, keys)

    monkeypatch.setattr(Store, "delete", noting)
    sweep(swept, keep_versions=1, keep_steps=1, keep_snapshots=1)
    for markers, others in zip(deleted[::2], deleted[1::2], strict=True):
        assert all(key.endswith(".json") for key in markers)
        assert not any(key.endswith(("manifest.json", "marker.json")) for key in others)


def test_a_batch_that_a_kept_commit_names_stays(run: RunStore) -> None:
    step_of(run, 1)
    carried = read_commit(run, 1).refs["batch"].rows(0, 1)
    for step in range(2, 8):
        step_of(run, step, also=carried if step == 7 else None)
    snapshot_of(run, 6)
    sweep(run, keep_versions=1, keep_steps=1, keep_snapshots=1)
    all_is_there(run, range(7, 8))
    left = run.store.list(f"{run.step_key(1)}/rollout")
    assert left == [run.stage_key(1, "rollout", 0, "k")]
    for step in range(8, 10):
        step_of(run, step)
    snapshot_of(run, 9)
    sweep(run, keep_versions=1, keep_steps=1, keep_snapshots=1)
    assert run.store.list(f"{run.step_key(1)}/rollout") == []


def test_without_a_snapshot_every_batch_stays(run: RunStore) -> None:
    for step in range(1, 5):
        step_of(run, step)
    sweep(run, keep_versions=1, keep_steps=1, keep_snapshots=2)
    all_is_there(run, range(1, 5))
    assert versions(run) == [0, 3, 4]  # the last commit names the last two


def test_all_steps_are_kept_unless_asked(swept: RunStore) -> None:
    sweep(swept, keep_versions=1, keep_steps=None, keep_snapshots=1)
    all_is_there(swept, range(1, 11))


def test_what_is_not_committed_is_not_touched(swept: RunStore) -> None:
    publish_version(swept, 11)
    key = swept.stage_key(11, "rollout", 0, "k")
    ref = write_batch(swept.store, key, {"reward": [1.0]})
    swept.store.write(f"{swept.state_key(12)}/0.distcp", b"being written")
    sweep(swept, keep_versions=1, keep_steps=1, keep_snapshots=1)
    assert 11 in versions(swept)
    ref.verify(swept.store)
    assert swept.store.exists(f"{swept.state_key(12)}/0.distcp")
    assert head(swept) == 10


@pytest.mark.parametrize(
    ("back", "states", "below"),
    [(10, [9], 10), (8, [6, 9], 7), (6, [6, 9], 7), (5, [3, 6, 9], 4), (2, [3, 6, 9], 1)],
)
def test_a_step_to_which_a_guard_may_go_back_can_be_rebuilt(
    swept: RunStore, back: int, states: list[int], below: int
) -> None:
    """The snapshot at or before it stays with the batches since, or all batches before the first."""
    sweep(swept, keep_versions=1, keep_steps=1, keep_snapshots=1, rebuilt_from=back)
    assert snapshots(swept) == states
    there = [step for step in range(1, 11) if swept.store.list(f"{swept.step_key(step)}/rollout")]
    assert there == list(range(below, 11))


def test_a_critics_snapshots_stay_and_go_with_the_policys(run: RunStore) -> None:
    critic = replace(run, role="critic")
    for step in range(1, 7):
        step_of(run, step)
        if step % 2 == 0:
            snapshot_of(critic, step)
            snapshot_of(run, step)
    snapshot_of(critic, 7)  # its flow was killed before the policy's was written
    assert snapshots(run) == [2, 4, 6] and snapshots(critic) == [2, 4, 6, 7]
    removed = sweep(run, keep_versions=1, keep_steps=None, keep_snapshots=2)
    assert snapshots(run) == [4, 6] and snapshots(critic) == [4, 6, 7]
    assert any("/critic/000002/" in key for key in removed)


def test_an_unfinished_old_snapshot_goes(swept: RunStore) -> None:
    swept.store.write(f"{swept.state_key(5)}/0.distcp", b"its writer died")
    removed = sweep(swept, keep_versions=20, keep_steps=None, keep_snapshots=3)
    assert removed == [f"{swept.state_key(5)}/0.distcp"]


def test_a_new_run_has_nothing_to_remove(run: RunStore) -> None:
    assert sweep(run, keep_versions=1, keep_steps=1, keep_snapshots=1) == []


def test_what_a_version_is_based_on_stays_with_it(run: RunStore) -> None:
    refs: dict[int, WeightsRef] = {}
    bases = {2: 1, 3: 2, 4: 1, 6: 5}
    for step in range(1, 9):
        refs[step] = step_of(run, step, base=refs.get(bases.get(step, 0)))
    for known in (True, False):
        if not known:
            run.store.delete([f"{run.run}/index.json"])
        sweep(run, keep_versions=1, keep_steps=None, keep_snapshots=1, tagged={3, 6})
        assert versions(run) == [0, 1, 2, 3, 5, 6, 7, 8]
    sweep(run, keep_versions=1, keep_steps=None, keep_snapshots=1, tagged={6})
    assert versions(run) == [0, 5, 6, 7, 8]


def test_the_base_of_adapters_stays_however_old_it_is(run: RunStore) -> None:
    weights = torch.ones(4, 4)
    base = publish(run.store, run.run, 0, [("w.weight", weights)], {}, key=base_key(run, "float32"))
    adapter, below = Adapter(rank=1, alpha=1.0), BaseVersion(key=base.key, digest=base.digest)
    before = None
    for step in range(6):
        factors = [("base_model.model.w.lora_A.weight", torch.full((1, 4), float(step)))]
        out = publish(run.store, run.run, step, factors, {}, base=below, adapter=adapter)
        if before is not None:
            made = Commit(step=step, parent=step - 1, refs={}, version_in=before, version_out=out)
            commit(run, made)
            snapshot_of(run, step)
        before = out
    removed = sweep(run, keep_versions=1, keep_steps=1, keep_snapshots=1)
    assert any("weights/v000002/" in key for key in removed)
    assert not any("base-" in key for key in removed)
    assert run.versions() == [0, 4, 5]
    assert torch.equal(dict(stream(run.store, base))["w.weight"], weights)
    assert find_base(run, "float32") == below
    assert find_base(run, "bfloat16") is None


@pytest.mark.parametrize("keep", [1, 3, 20])
def test_the_version_with_which_the_run_began_stays(swept: RunStore, keep: int) -> None:
    """Else nobody could ask whether the run has made its policy better."""
    for _ in range(2):
        sweep(swept, keep_versions=keep, keep_steps=1, keep_snapshots=1)
        assert versions(swept)[0] == 0
        list(stream(swept.store, read_commit(swept, 1).version_in))


def test_a_first_version_that_an_older_refrain_removed_is_no_matter(swept: RunStore) -> None:
    swept.store.delete(swept.store.list(swept.weights_key(0)))
    sweep(swept, keep_versions=1, keep_steps=1, keep_snapshots=1)
    assert versions(swept) == [9, 10]


def test_what_is_refused_in_the_last_moment_stays_with_what_it_is_based_on(run: RunStore) -> None:
    refs: dict[int, WeightsRef] = {}
    for step in range(1, 9):
        refs[step] = step_of(run, step, base=refs.get({2: 1, 3: 2, 6: 5}.get(step, 0)))
    run.store.delete([f"{run.weights_key(4)}/{MANIFEST}"])  # a sweep that was killed in the middle
    asked: list[list[int]] = []

    def all_but_3(versions: Collection[int]) -> Collection[int]:
        asked.append([*versions])
        return {*versions} - {3}

    sweep(run, 1, None, 1, may_go=all_but_3)
    assert asked == [[1, 2, 3, 5, 6]], "of version 4 there is nothing left to keep"
    assert versions(run) == [0, 1, 2, 3, 7, 8]
    sweep(run, 1, None, 1, may_go=lambda versions: versions)
    assert versions(run) == [0, 7, 8]
