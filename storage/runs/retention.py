"""What is removed from a run's store and what never is, by an index of what is there.

Kept: the newest policy versions, the one with which the run began, those of kept snapshots, those
that the last commit names, tagged ones, and the bases of all these; the newest snapshots; the
batches of the newest steps and of every step after the oldest kept snapshot, which are needed to
rebuild the trainer's state; what runs that began here share with it, or play against. Every commit
stays. Nothing newer than HEAD is touched. Markers go before what they mark, so a reader sees all of
a thing or nothing.

`index.json` is a note, never the truth, so that nobody lists the store or reads every commit for
what is there: it names the commit that it goes up to by digest. Where the chain of commits does not
bear that out, or there is no index, it is made anew from commits and listings. Only who holds the
run's lease writes it.

What writers that died left is removed when the run goes on. Nothing of it is wrong to leave, since
readers trust markers and commits only. But a policy version or a snapshot of a step that was never
committed would be in the way of the step's next try, which may sample otherwise; and what no commit
names is only in the way of whoever pays for the store. Of the committed steps only those are looked
at in which something may lie: the index knows in which an attempt failed, and which were under way
when a flow died.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storage.objects import documents
from storage.objects.documents import StoredRecord
from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreError
from storage.runs.commit_log import Commit, read_commit, read_commit_digest, read_outline
from storage.runs.commit_log import head as committed_head
from storage.runs.run_store import DATA_SUFFIX, TRAINED_ROLES, RunStore, start_of
from storage.runs.snapshots import MARKER, is_marked
from storage.runs.weights import MANIFEST, of_registration, open_manifest_at

log = logging.getLogger(__name__)

INDEX, INDEX_FORMAT = "index.json", "refrain.index/1"
SWEPT, FORMAT = "retention.json", "refrain.retention/1"
PIN_FORMAT = "refrain.pin/1"
YOUNG = 3600.0  # seconds in which a pin counts although its child has not been written yet


class RunIndex(BaseModel):
    """What is there, of the steps up to one. Changed in place by who writes it."""

    model_config = ConfigDict(extra="ignore")

    step: int  # the committed step that it goes up to
    commit_digest: str  # of that step's commit.json
    versions: list[int] = Field(default_factory=list)  # policy versions with a folder, ascending
    bases: dict[int, str] = Field(default_factory=dict)  # of those that have one: the base's folder
    # Role -> steps with a snapshot of its trainer, ascending; and those with an unfinished one.
    snapshots: dict[str, list[int]] = Field(default_factory=dict)
    unfinished: dict[str, list[int]] = Field(default_factory=dict)
    # Step -> objects of other steps that its commit names. Of the steps from `borrowed_from` on only
    # those that have some; of others, which are kept for a child, all that are known.
    borrowed: dict[int, list[str]] = Field(default_factory=dict)
    borrowed_from: int
    swept: int = 0  # of the steps below this one nothing is there but what the next two name
    spared: dict[int, list[str]] = Field(default_factory=dict)  # swept step -> objects that stayed
    pinned: list[int] = Field(default_factory=list)  # steps below `swept` that stayed for a child
    # Steps in which something may lie that no commit names: a failed attempt's, or a dead flow's.
    suspects: list[int] = Field(default_factory=list)


def read_index(run: RunStore, head: int) -> RunIndex | None:
    """The index, brought up to the last committed step; None where it is missing or does not hold.

    It reads the commits since, of which the first must name the index's commit as its parent.
    """
    key = f"{run.run}/{INDEX}"
    foreign = ObjectDamaged(f"Object {key} is not of this run's commits.")
    try:
        index = documents.validated(RunIndex, key, documents.read(run.store, key, INDEX_FORMAT))
        if index.step > head or (
            index.step == head and read_commit_digest(run, head) != index.commit_digest
        ):
            raise foreign
        for step in range(index.step + 1, head + 1):
            commit = read_commit(run, step)
            if step == index.step + 1 and commit.parent_digest != index.commit_digest:
                raise foreign
            _add(run, index, commit)
        if index.step < head:
            index.step, index.commit_digest = head, read_commit_digest(run, head)
        else:
            _add_snapshots(run, index, head)  # one may be stored after its step is committed
    except ObjectMissing:
        return None
    except ObjectDamaged as error:
        log.warning("%s It is made anew.", error)
        return None
    return index


def write_index(run: RunStore, index: RunIndex) -> None:
    """Put the index in place of an earlier one. Only under the run's lease."""
    documents.write_record(run.store, f"{run.run}/{INDEX}", INDEX_FORMAT, index, indent=None)


def make_index(run: RunStore, head: int) -> RunIndex:
    """The index of a run up to a committed step, by listing its store."""
    index = RunIndex(
        step=head,
        commit_digest=read_commit_digest(run, head),
        versions=[version for version in run.versions() if version <= head],
        borrowed_from=head + 1,
        suspects=[step for step in run.steps() if step <= head],
    )
    for role in TRAINED_ROLES:
        trained = replace(run, role=role)
        steps = [step for step in trained.state_steps() if step <= head]
        index.snapshots[role] = [step for step in steps if is_marked(trained, step)]
        index.unfinished[role] = sorted({*steps} - {*index.snapshots[role]})
    for version in index.versions:
        with contextlib.suppress(ObjectMissing, ObjectDamaged):  # then nothing can be read by it
            base = open_manifest_at(run.store, run.weights_key(version)).base
            if base is not None:
                index.bases[version] = base.key
    return index


def _add(run: RunStore, index: RunIndex, commit: Commit) -> None:
    """One more committed step."""
    version = commit.version_out
    if version.key == run.weights_key(version.version) and version.version not in index.versions:
        index.versions.append(version.version)
        if version.base is not None:
            index.bases[version.version] = version.base.key
    _add_snapshots(run, index, commit.step)
    if index.borrowed_from > commit.step:
        index.borrowed_from = commit.step
    if keys := borrowed_objects(run, commit):
        index.borrowed[commit.step] = keys
    failed = any(
        attempt.get("error") or attempt.get("number") not in (None, 1)
        for attempt in commit.attempts
    )
    if commit.step not in index.suspects and (failed or unnamed_objects(run, commit)):
        index.suspects.append(commit.step)


def _add_snapshots(run: RunStore, index: RunIndex, step: int) -> None:
    """The snapshots of a step and of the one before; a critic's is written before the policy's."""
    for at in (step - 1, step):
        if at in index.snapshots.get("actor", []) or not is_marked(replace(run, role="actor"), at):
            continue
        for role in TRAINED_ROLES:
            steps = index.snapshots.setdefault(role, [])
            if at not in steps and (role == "actor" or is_marked(replace(run, role=role), at)):
                index.snapshots[role] = sorted([*steps, at])
            unfinished = index.unfinished.get(role, [])
            index.unfinished[role] = [number for number in unfinished if number != at]


def borrowed_objects(run: RunStore, commit: Commit) -> list[str]:
    """Batch objects that a commit names and that lie with other steps, as a carried group's do."""
    folder = f"{run.step_key(commit.step)}/"
    return sorted(key for key in commit.objects if not key.startswith(folder))


def unnamed_objects(run: RunStore, commit: Commit) -> list[str]:
    """What lies with a committed step and is named by its commit nowhere: batches and lists."""
    objects = commit.objects | {
        run.commit_key(commit.step),
        "" if commit.lists is None else commit.lists.key,
    }
    return [
        key
        for key in run.store.list(run.step_key(commit.step))
        if key not in objects and (key.endswith(DATA_SUFFIX) or run.is_record(key))
    ]


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
    head = committed_head(run)
    if head is None:
        return []
    index, start = read_index(run, head) or make_index(run, head), start_of(run)
    snapshots = _kept(index, keep_snapshots, head if rebuilt_from is None else rebuilt_from)
    shared = pins(run)
    stay = {*snapshots} | {pin.snapshot for pin in shared if pin.snapshot is not None}
    oldest = (
        snapshots[0]
        if snapshots and (rebuilt_from is None or snapshots[0] <= rebuilt_from)
        else start
    )
    first_kept = start + 1 if keep_steps is None else min(head - keep_steps, oldest) + 1
    # Where every batch is kept every step can be replayed, those after a fork's beginning too.
    stay |= {start} if first_kept <= start + 1 else set()
    removed = _sweep_snapshots(run, index, snapshots, stay)
    # What a run is compared with is the version that it began with.
    named = {start, *snapshots, *tagged, *(pin.step for pin in shared)}
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
    steps = index.snapshots.get("actor", [])
    before = [step for step in steps if step <= rebuilt_from]
    first = min(len(steps) - keep, len(before) - 1 if before else 0)
    return steps[max(0, first) :]


def _sweep_snapshots(
    run: RunStore, index: RunIndex, newest: list[int], stay: Collection[int]
) -> list[str]:
    """Snapshots older than the kept ones, and unfinished ones older than the newest of them."""
    if not newest:
        return []
    removed = []
    for role in TRAINED_ROLES:  # the critic's are written at the same steps
        trained = replace(run, role=role)
        for listing in (index.snapshots, index.unfinished):
            gone = [
                step for step in listing.get(role, []) if step < newest[-1] and step not in stay
            ]
            for step in gone:
                removed += _remove(run, run.store.list(trained.state_key(step)), MARKER)
            listing[role] = [step for step in listing.get(role, []) if step not in gone]
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
    last = read_outline(run, head)
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
    folder, versions = f"{run.run}/weights/v", []
    for key in keys:
        place, _, name = key.rpartition("/")
        if name == MANIFEST and place.startswith(folder):
            versions.append(int(place.removeprefix(folder)))
    return sorted(versions)


def _bases(run: RunStore, index: RunIndex, versions: Collection[int]) -> set[int]:
    """The run's versions without which some of these cannot be read, bases of bases among them."""
    number = {run.weights_key(version): version for version in index.versions}
    bases: set[int] = set()
    pending = [index.bases[version] for version in versions if version in index.bases]
    while pending:
        version = number.get(pending.pop())
        if version is not None and version not in bases:
            bases.add(version)
            pending += [index.bases[version]] if version in index.bases else []
    return bases


def _sweep_batches(
    run: RunStore, index: RunIndex, newest: range, pinned: Collection[int]
) -> list[str]:
    """The stage results of the steps before the kept ones that no kept commit or child names."""
    first = max(newest.start, index.swept)
    if index.swept == 0:  # a new index: which steps are there is known by listing them
        old = [step for step in run.steps() if step < newest.start]
    else:
        old = [*index.pinned, *range(index.swept, first)]
    index.swept = first
    if not old and not index.spared:
        return []
    if first > batches_below(run):  # said before it is done: what is missing then is no damage
        record = {"steps_below": first, "batches_below": first}
        run.store.write(f"{run.run}/{SWEPT}", documents.encode(FORMAT, record))
    needed = _borrowed(run, index, newest, pinned)
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
    run: RunStore, index: RunIndex, newest: range, pinned: Collection[int]
) -> frozenset[str]:
    """What the commits that are kept, or pinned by a child, name of other steps' batches."""
    for step in newest:  # none, once the index has them: of a new index, or one with more to keep
        if step >= index.borrowed_from:
            break
        index.borrowed[step] = borrowed_objects(run, read_commit(run, step))
    index.borrowed_from = min(index.borrowed_from, newest.start)
    for step in pinned:
        if step < index.borrowed_from and step not in index.borrowed:
            index.borrowed[step] = borrowed_objects(run, read_commit(run, step))
    index.borrowed = {
        step: keys
        for step, keys in index.borrowed.items()
        if (step in newest and keys) or step in pinned
    }
    index.borrowed_from = newest.start
    return frozenset(key for keys in index.borrowed.values() for key in keys)


def batches_below(run: RunStore) -> int:
    """Of the steps before this one only batches that something still needs are there."""
    try:
        record = documents.read(run.store, f"{run.run}/{SWEPT}", FORMAT)
    except ObjectMissing:
        return 0
    numbers = (record.get(field) for field in ("batches_below", "steps_below"))
    return max((number for number in numbers if isinstance(number, int)), default=0)


def _remove(run: RunStore, keys: list[str], marker: str) -> list[str]:
    """Delete the keys, those that end like a marker first: readers trust it."""
    markers = [key for key in keys if key.endswith(marker)]
    data = [key for key in keys if not key.endswith(marker)]
    run.store.delete(markers)
    run.store.delete(data)
    return markers + data


class Pin(StoredRecord):
    """What a child needs of its parent."""

    child: str  # name of the run
    step: int  # the parent's step that it began at, or whose version it plays against
    # The parent's snapshot from which that is rebuilt; 0: the beginning; None: that is not asked for.
    snapshot: int | None
    weights: bool = True  # the step's policy version was there to be shared when the child began
    made_at: float = 0.0  # seconds since 1970


def pin_version(child: RunStore, owner: RunStore, version: int, named: str) -> None:
    """Have the owner's retention keep a policy version for as long as the child exists.

    named: what the child takes it for, of which there may be several.
    """
    pin = Pin(child=child.run, step=version, snapshot=None, made_at=time.time())
    write_pin(owner, f"{child.run}@{named}", pin)


def unpin_version(child: RunStore, owner: RunStore, named: str) -> None:
    """Take back what `pin_version` did."""
    owner.store.delete([f"{owner.run}/children/{child.run}@{named}.json"])


def write_pin(parent: RunStore, name: str, pin: Pin) -> None:
    """`name`: that nothing else has which a child needs of `parent`."""
    key = f"{parent.run}/children/{name}.json"
    documents.write_record(parent.store, key, PIN_FORMAT, pin)


def pins(run: RunStore) -> list[Pin]:
    """The pins of the children that exist."""
    live = []
    for name in run.store.children(f"{run.run}/children"):
        key = f"{run.run}/children/{name}"
        record = documents.read(run.store, key, PIN_FORMAT)
        try:
            pin = Pin.model_validate(record)
        except ValidationError:
            raise StoreError(f"Object {key} names no child. Remove it.") from None
        young = time.time() - pin.made_at < YOUNG
        if young or run.store.exists(RunStore(run.store, pin.child).run_json_key):
            live.append(pin)
    return live


def remove_version(run: RunStore, version: int) -> list[str]:
    """Remove a policy version that no commit names, its manifest first; returns the keys."""
    return _remove(run, run.store.list(run.weights_key(version)), MANIFEST)


def clear(run: RunStore, head: int) -> list[str]:
    """Remove what is left of writers that died; returns the keys, in that order.

    `head`: the last committed step. Only under the run's lease, while none of its engines works.
    Finished shards of the step after it stay: the next try reuses them.
    """
    committed = run.store.exists(run.commit_key(head))
    index = (read_index(run, head) or make_index(run, head)) if committed else None
    removed = orphans(run, head, [] if index is None else index.suspects)
    run.store.delete(removed)
    if index is not None:  # the steps under way have what a dead flow began, and their next try not
        under_way = itertools.takewhile(
            lambda step: run.store.list(run.step_key(step)), itertools.count(head + 1)
        )
        index.suspects = list(under_way)
        write_index(run, index)
    for version in run.versions():
        if version > head:
            removed += remove_version(run, version)
    for role in TRAINED_ROLES:
        trained = replace(run, role=role)
        for step in trained.state_steps():
            if step > head:
                removed += _remove(run, run.store.list(trained.state_key(step)), MARKER)
    questions = run.store.list(run.questions_key)  # of judges that died
    run.store.delete(questions)
    run.store.delete_unfinished(run.run)
    return removed + questions


def orphans(run: RunStore, head: int, steps: Collection[int] | None = None) -> list[str]:
    """What dead attempts wrote beside the committed steps and versions: keys that nothing names.

    steps: those to look at, with the versions that they made; None for all that there are.
    """
    keys = []
    for version in run.versions() if steps is None else steps:
        if version <= head:
            keys += _beside_manifest(run, version)
    for step in run.steps() if steps is None else steps:
        if step <= head:
            keys += unnamed_objects(run, read_commit(run, step))
    return keys


def _beside_manifest(run: RunStore, version: int) -> list[str]:
    key = run.weights_key(version)
    files = run.store.list(key)
    if not files:
        return []
    try:
        manifest = open_manifest_at(run.store, key)
    except ObjectMissing:
        return files
    named = {*manifest.files, MANIFEST}
    paths = {file: file.removeprefix(f"{key}/") for file in files}
    return [file for file, path in paths.items() if path not in named and not of_registration(path)]
