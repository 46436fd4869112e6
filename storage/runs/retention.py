"""What is removed from a run's store, and what never is.

Kept: the newest policy versions, those of kept snapshots, those that the last commit names, tagged
ones; the newest snapshots; the batches of the newest steps and of every step after the oldest kept
snapshot, which are needed to rebuild the trainer's state; what runs that began here share with it.
Every commit.json stays. Nothing newer than HEAD is touched. Markers go before what they mark, so a
reader sees all of a thing or nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from storage.objects import documents
from storage.objects.errors import ObjectMissing
from storage.runs import commit_log as commits
from storage.runs import snapshots
from storage.runs.forks import Pin, pins
from storage.runs.origins import committer, start_of
from storage.runs.run_store import RunStore
from storage.runs.snapshots import MARKER, Snapshot
from storage.runs.weights import MANIFEST

FORMAT = "refrain.retention/1"


def sweep(
    run: RunStore,
    keep_versions: int,
    keep_steps: int | None,
    keep_snapshots: int,
    tagged: Collection[int] = (),
) -> list[str]:
    """Remove what is no longer needed; returns the keys removed, in that order.

    keep_versions: policy versions; keep_steps: steps whose batches stay, None for all;
    keep_snapshots: of the trainer's state; tagged: versions that always stay. It may be stopped
    and run again at any time. Run it only under the run's lease.
    """
    head = commits.head(run)
    if head is None:
        return []
    marked = [step for step in snapshots.snapshots(run) if step <= head]
    kept = [snapshots.read(run, step) for step in marked[-keep_snapshots:]]
    shared = pins(run)
    stay = {snapshot.step for snapshot in kept} | {pin.snapshot for pin in shared}
    # Where every batch is kept every step can be replayed, those after a fork's beginning too.
    stay |= {start_of(run)} if keep_steps is None else set()
    removed = _sweep_snapshots(run, kept, stay)
    # The critic's are written before the actor's, at the same steps.
    removed += _sweep_snapshots(replace(run, role="critic"), kept, stay)
    tagged = {*tagged, *(pin.step for pin in shared)}
    removed += _sweep_versions(run, head, kept, keep_versions, tagged)
    if keep_steps is not None:
        oldest = kept[0].step if kept else start_of(run)
        first_kept = min(head - keep_steps, oldest) + 1
        removed += _sweep_batches(run, head, first_kept, shared)
    return removed


def _sweep_snapshots(run: RunStore, kept: list[Snapshot], stay: Collection[int]) -> list[str]:
    """Snapshots older than the kept ones, and unfinished ones older than the newest of them."""
    if not kept:
        return []
    removed = []
    for step in run.state_steps():
        if step not in stay and step < kept[-1].step:
            removed += _remove(run, run.store.list(run.state_key(step)), MARKER)
    return removed


def _sweep_versions(
    run: RunStore,
    head: int,
    kept: list[Snapshot],
    keep_versions: int,
    tagged: Collection[int],
) -> list[str]:
    last = commits.read_commit(run, head)
    named = [last.version_in, last.version_out]
    made = [committer(run, snapshot.step) for snapshot in kept if snapshot.step > 0]
    named += [commits.read_commit(owner, step).version_out for owner, step in made]
    stay = {ref.version for ref in named} | set(tagged)
    published = [version for version in run.versions() if version <= last.version_out.version]
    stay.update(published[-keep_versions:])
    removed = []
    for version in published:
        if version not in stay:
            removed += _remove(run, run.store.list(run.weights_key(version)), MANIFEST)
    return removed


def _sweep_batches(run: RunStore, head: int, first_kept: int, shared: list[Pin]) -> list[str]:
    """The stage results of the steps before `first_kept` that no kept commit or child names."""
    done = _swept(run)
    old = [step for step in run.steps() if done <= step < first_kept]
    if not old:
        return []
    needed: set[str] = set()
    for step in range(max(first_kept, start_of(run) + 1), head + 1):
        needed |= commits.read_commit(run, step).objects
    removed = []
    pinned = {step for pin in shared for step in range(pin.snapshot + 1, pin.step + 1)}
    for step in pinned:  # a carried group's samples lie with the steps that began it
        needed |= commits.read_commit(run, step).objects
    spared = not pinned.isdisjoint(old)
    for step in (step for step in old if step not in pinned):
        keys = run.store.list(run.step_key(step))
        data = [key for key in keys if key != run.commit_key(step)]
        spared = spared or not needed.isdisjoint(data)
        removed += _remove(run, [key for key in data if key not in needed], ".json")
    # Steps with spared objects are looked at again once the commits in need of them are old.
    record = {"steps_below": done if spared else first_kept, "batches_below": first_kept}
    run.store.write(_swept_key(run), documents.encode(FORMAT, record))
    return removed


def _swept_key(run: RunStore) -> str:
    return f"{run.run}/retention.json"


def _swept(run: RunStore) -> int:
    """Batches of the steps before this one are gone already; saves listing them again."""
    return _recorded(run, "steps_below")


def batches_below(run: RunStore) -> int:
    """Of the steps before this one only batches that something still needs are there."""
    return max(_recorded(run, "batches_below"), _recorded(run, "steps_below"))


def _recorded(run: RunStore, field: str) -> int:
    try:
        number = documents.read(run.store, _swept_key(run), FORMAT).get(field)
    except ObjectMissing:
        return 0
    return number if isinstance(number, int) else 0


def _remove(run: RunStore, keys: list[str], marker: str) -> list[str]:
    """Delete the keys, those that end like a marker first."""
    markers = [key for key in keys if key.endswith(marker)]
    others = [key for key in keys if not key.endswith(marker)]
    run.store.delete(markers)
    run.store.delete(others)
    return markers + others
