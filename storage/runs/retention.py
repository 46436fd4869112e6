"""What is removed from a run's store, and what never is.

Kept: the newest policy versions, the one with which the run began, those of kept snapshots, those
that the last commit names, tagged ones, and the bases of all these; the newest snapshots; the batches
of the newest steps and of every step after the oldest kept snapshot, which are needed to rebuild the
trainer's state; what runs that began here share with it, or play against. Every commit stays. Nothing
newer than HEAD is touched. Markers go before what they mark, so a reader sees all of a thing or
nothing.

What is there is known by an index (run_index.py); while that holds, only the folders of what goes are
listed, whatever the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from storage.objects import documents
from storage.objects.errors import ObjectMissing
from storage.runs import commit_log as commits
from storage.runs.forks import pins
from storage.runs.run_index import (
    RunIndex,
    borrowed_objects,
    make_index,
    read_index,
    write_index,
)
from storage.runs.run_store import TRAINED_ROLES, RunStore, start_of
from storage.runs.snapshots import MARKER
from storage.runs.weights import MANIFEST

FORMAT = "refrain.retention/1"


def sweep(
    run: RunStore,
    keep_versions: int,
    keep_steps: int | None,
    keep_snapshots: int,
    tagged: Collection[int] = (),
    rebuilt_from: int | None = None,
    may_go: Callable[[Collection[int]], Collection[int]] | None = None,
) -> list[str]:
    """Remove what is no longer needed; returns the keys removed, in that order.

    keep_versions: policy versions; keep_steps: steps whose batches stay, None for all;
    keep_snapshots: of the trainer's state; tagged: versions that always stay; rebuilt_from: the
    trainer's state of this step and those after it can be rebuilt, whatever the settings keep;
    may_go: asked last of all which of the policy versions that go may. It
    may be stopped and run again at any time. Run it only under the run's lease.
    """
    head = commits.head(run)
    if head is None:
        return []
    index, start = read_index(run, head) or make_index(run, head), start_of(run)
    kept = _kept(index, keep_snapshots, head if rebuilt_from is None else rebuilt_from)
    shared = pins(run)
    stay = {*kept} | {pin.snapshot for pin in shared if pin.snapshot is not None}
    oldest = kept[0] if kept and (rebuilt_from is None or kept[0] <= rebuilt_from) else start
    first_kept = start + 1 if keep_steps is None else min(head - keep_steps, oldest) + 1
    # Where every batch is kept every step can be replayed, those after a fork's beginning too.
    stay |= {start} if first_kept <= start + 1 else set()
    removed = _sweep_snapshots(run, index, kept, stay)
    # What a run is compared with is the version that it began with.
    named = {start, *kept, *tagged, *(pin.step for pin in shared)}
    removed += _sweep_versions(run, index, head, keep_versions, named, may_go)
    if keep_steps is None:
        index.borrowed, index.borrowed_from = {}, head + 1  # nobody asks
    else:
        pinned = {
            step
            for pin in shared
            if pin.snapshot is not None
            for step in range(min(pin.snapshot + 1, pin.step), pin.step + 1)
        }
        removed += _sweep_batches(run, index, range(max(first_kept, start + 1), head + 1), pinned)
    write_index(run, index)
    return removed


def _kept(index: RunIndex, keep: int, rebuilt_from: int) -> list[int]:
    """The newest snapshots, and those before them down to one from which a step is rebuilt."""
    known = index.snapshots.get("actor", [])
    before = [step for step in known if step <= rebuilt_from]
    first = min(len(known) - keep, len(before) - 1 if before else 0)
    return known[max(0, first) :]


def _sweep_snapshots(
    run: RunStore, index: RunIndex, kept: list[int], stay: Collection[int]
) -> list[str]:
    """Snapshots older than the kept ones, and unfinished ones older than the newest of them."""
    if not kept:
        return []
    removed = []
    for role in TRAINED_ROLES:  # the critic's are written at the same steps
        trained = replace(run, role=role)
        for known in (index.snapshots, index.unfinished):
            gone = [step for step in known.get(role, []) if step < kept[-1] and step not in stay]
            for step in gone:
                removed += _remove(run, run.store.list(trained.state_key(step)), MARKER)
            known[role] = [step for step in known.get(role, []) if step not in gone]
    return removed


def _sweep_versions(
    run: RunStore,
    index: RunIndex,
    head: int,
    keep_versions: int,
    named: Collection[int],
    may_go: Callable[[Collection[int]], Collection[int]] | None,
) -> list[str]:
    """named: versions that stay besides the newest and those of the last commit."""
    last = commits.read_outline(run, head)
    stay = {last.version_in.version, last.version_out.version, *named}
    stay.update(index.versions[-keep_versions:])
    stay |= _bases(run, index, stay)
    gone = [version for version in index.versions if version not in stay]
    if may_go is not None and gone:
        whole = [version for version in gone if is_there(run, version)]
        if refused := {*whole} - {*may_go(whole)}:
            stay |= refused | _bases(run, index, refused)
            gone = [version for version in gone if version not in stay]
    removed = []
    for version in gone:
        removed += _remove(run, run.store.list(run.weights_key(version)), MANIFEST)
    index.versions = [version for version in index.versions if version in stay]
    index.bases = {version: base for version, base in index.bases.items() if version in stay}
    return removed


def is_there(run: RunStore, version: int) -> bool:
    """Whether a policy version is whole, and not partly removed or written."""
    return run.store.exists(f"{run.weights_key(version)}/{MANIFEST}")


def removed_versions(run: RunStore, keys: Collection[str]) -> list[int]:
    """The policy versions that are gone with these keys, ascending."""
    folder, found = f"{run.run}/weights/v", []
    for key in keys:
        place, _, name = key.rpartition("/")
        if name == MANIFEST and place.startswith(folder):
            found.append(int(place.removeprefix(folder)))
    return sorted(found)


def _bases(run: RunStore, index: RunIndex, versions: Collection[int]) -> set[int]:
    """The run's versions without which some of these cannot be read, bases of bases among them."""
    number = {run.weights_key(version): version for version in index.versions}
    found: set[int] = set()
    left = [index.bases[version] for version in versions if version in index.bases]
    while left:
        version = number.get(left.pop())
        if version is not None and version not in found:
            found.add(version)
            left += [index.bases[version]] if version in index.bases else []
    return found


def _sweep_batches(
    run: RunStore, index: RunIndex, kept: range, pinned: Collection[int]
) -> list[str]:
    """The stage results of the steps before the kept ones that no kept commit or child names."""
    first = max(kept.start, index.swept)
    if index.swept == 0:  # a new index: which steps are there is known by listing them
        old = [step for step in run.steps() if step < kept.start]
    else:
        old = [*index.pinned, *range(index.swept, first)]
    index.swept = first
    if not old and not index.spared:
        return []
    if first > batches_below(run):  # said before it is done: what is missing then is no damage
        record = {"steps_below": first, "batches_below": first}
        run.store.write(_swept_key(run), documents.encode(FORMAT, record))
    needed = _borrowed(run, index, kept, pinned)
    removed = []
    for step, keys in sorted(index.spared.items()):
        removed += _remove(run, [key for key in keys if key not in needed], ".json")
        index.spared[step] = [key for key in keys if key in needed]
    for step in (step for step in old if step not in pinned):
        data = [key for key in run.store.list(run.step_key(step)) if not run.is_record(key)]
        removed += _remove(run, [key for key in data if key not in needed], ".json")
        index.spared[step] = [key for key in data if key in needed]
    index.spared = {step: keys for step, keys in index.spared.items() if keys}
    index.pinned = sorted(step for step in old if step in pinned)
    index.suspects = [step for step in index.suspects if step >= first or step in index.pinned]
    return removed


def _borrowed(
    run: RunStore, index: RunIndex, kept: range, pinned: Collection[int]
) -> frozenset[str]:
    """What the commits that are kept, or pinned by a child, name of other steps' batches."""
    for step in kept:  # none, once the index has them: of a new index, or one with more to keep
        if step >= index.borrowed_from:
            break
        _add_borrowed(run, index, step)
    index.borrowed_from = min(index.borrowed_from, kept.start)
    for step in pinned:
        if step < index.borrowed_from and step not in index.borrowed:
            _add_borrowed(run, index, step)
    index.borrowed = {
        step: keys
        for step, keys in index.borrowed.items()
        if (step in kept and keys) or step in pinned
    }
    index.borrowed_from = kept.start
    return frozenset(key for keys in index.borrowed.values() for key in keys)


def _add_borrowed(run: RunStore, index: RunIndex, step: int) -> None:
    index.borrowed[step] = borrowed_objects(run, commits.read_commit(run, step))


def _swept_key(run: RunStore) -> str:
    return f"{run.run}/retention.json"


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
