"""The audit of a run: is everything that it says true, still there, and accounted for?

Read only. Problems are contradictions: an altered commit, a count that the stored batches do not
bear out, an object that is missing or damaged. Orphans are objects that nothing names: they cost
room and nothing else. What retention removed is neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from storage.batches.columns import TASK, SampleStatus
from storage.batches.reading import columns_of
from storage.batches.ref_columns import Source
from storage.batches.refs import BatchRef
from storage.evaluations.results import NOTES, EvaluationResult, notes_of, read_result
from storage.objects import documents
from storage.objects.documents import Digester, digest
from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreError
from storage.objects.store import Store
from storage.runs import snapshots, weights
from storage.runs.adapters import base_keys
from storage.runs.commit_log import (
    HEAD_FORMAT,
    Commit,
    Ledger,
    parse_commit,
    read_commit,
    read_commit_digest,
    read_outline,
)
from storage.runs.forks import check_state
from storage.runs.live import PROGRESS_NAME as PROGRESS
from storage.runs.opponents import opponent_of, recorded_opponent
from storage.runs.retention import batches_below, pins
from storage.runs.run_store import (
    DATA_SUFFIX,
    TRAINED_ROLES,
    Origin,
    RunStore,
    committer,
    origin_of,
    parent_of,
    start_of,
)
from storage.runs.seen_rows import ROWS, SEEN
from storage.runs.weights import MANIFEST, WeightsRef, of_registration

WINDOW_BYTES = 64 * 2**20

# Objects at the top of a run's folder that are its own records.
RECORDS = (
    "run.json",
    "HEAD",
    "LEASE",
    "retention.json",
    "index.json",
    "curves.json",
    "progress.png",
    "timeline.png",
    "live.json",
    "end.json",
    PROGRESS,
    ROWS,
    SEEN,
)
# Several counts read the same columns, which of a store over HTTP are kept meanwhile.
CACHE_BYTES = 32 * 2**20
# Folders whose objects are kept for as long as the run.
FOLDERS = ("children", "rescored", "judged", "taught", "readmissions", NOTES)


@dataclass(kw_only=True, slots=True)
class Read:
    """What an audit has read, each object once."""

    objects: int = 0
    nbytes: int = 0
    done: set[str] = field(default_factory=set)  # keys

    def count(self, key: str, nbytes: int) -> None:
        self.done.add(key)
        self.objects += 1
        self.nbytes += nbytes


def sources_of(commit: Commit) -> dict[str, Source]:
    """Every batch object that a commit names, by key."""
    return sources_in(commit.refs.values())


def sources_in(refs: Iterable[BatchRef]) -> dict[str, Source]:
    """Every batch object that refs name, by key."""
    columns = (column for ref in refs for column in ref.columns.values())
    return {source.key: source for column in columns for source in column.sources}


def check_batch(store: Store, source: Source, read: Read) -> None:
    """Read a batch object whole. Raises ObjectMissing, ObjectDamaged naming the column."""
    if source.key in read.done:
        return
    view = memoryview(store.read(source.key))  # one request; not through the cache
    read.count(source.key, view.nbytes)
    head = view[: source.head]
    if digest(head) != source.digest:
        raise ObjectDamaged(f"Object {source.key} is damaged: its head is not the one written.")
    for name, column in columns_of(source.key, head, source.rows).items():
        if digest(view[column.start : column.stop]) != column.digest:
            raise ObjectDamaged(
                f"Object {source.key} is damaged: the digest of column {name!r} does not match."
            )


def check_version(store: Store, key: str, ref: WeightsRef | None, read: Read) -> list[str]:
    """Read a policy version's files, and those of its base; returns its own. Raises ObjectMissing,
    ObjectDamaged.

    `ref`: what a commit says of it, where one does.
    """
    if ref is None:
        manifest = weights.open_manifest_at(store, key)
    else:
        manifest = weights.open_manifest(store, ref)
    chain = [] if manifest.base is None else weights.open_chain(store, manifest.base)
    for folder, part in [(key, manifest), *chain]:
        for name, entry in part.files.items():
            _check_file(store, f"{folder}/{name}", entry.nbytes, entry.digest, read)
    return [f"{key}/{name}" for name in (*manifest.files, MANIFEST)]


def _check_file(store: Store, key: str, nbytes: int, expected: str, read: Read) -> None:
    size = store.size(key)
    if size != nbytes:
        raise ObjectDamaged(f"Object {key} is damaged: {size} bytes of {nbytes}.")
    if key in read.done:
        return
    total = Digester()
    for start in range(0, nbytes, WINDOW_BYTES):
        stop = min(start + WINDOW_BYTES, nbytes)
        total.update(store.read_ranges([(key, start, stop)])[0])
    read.count(key, nbytes)
    if total.digest() != expected:
        raise ObjectDamaged(f"Object {key} is damaged: its digest does not match.")


def check_snapshot(run: RunStore, folder: str, read: Read) -> list[str]:
    """Read a trainer snapshot whole; returns its files. Raises ObjectMissing, ObjectDamaged."""
    marker = f"{folder}/{snapshots.MARKER}"
    body = documents.read(run.store, marker, snapshots.FORMAT)
    snapshot = snapshots.Snapshot.model_validate(body)
    for name, file in snapshot.files.items():
        key = f"{folder}/{name}"
        size = run.store.size(key)
        if size != file.nbytes:
            raise ObjectDamaged(f"Object {key} is damaged: {size} bytes of {file.nbytes}.")
        if file.digest is not None:
            _check_file(run.store, key, file.nbytes, file.digest, read)
        elif key not in read.done:
            read.count(key, size)
    if snapshots.INDEX in snapshot.files:
        snapshots.check_pieces(run, folder)
    return [f"{folder}/{name}" for name in (*snapshot.files, snapshots.MARKER)]


def state_folders(run: RunStore) -> Iterator[tuple[int, str]]:
    """Step and folder of every trainer snapshot below the run, of any role, finished or not."""
    for role in TRAINED_ROLES:
        trained = replace(run, role=role)
        for step in trained.state_steps():
            yield step, trained.state_key(step)


def marked_objects(store: Store, markers: Iterable[str]) -> dict[str, set[str]]:
    """Stage markers, each with the batch objects that its record names."""
    objects = {}
    for key in markers:
        try:
            text = json.loads(store.read(key))
            sources = text["body"]["ref"]["sources"]
            objects[key] = {str(source[0]) for source in sources}
        except (ValueError, KeyError, TypeError, IndexError, ObjectMissing):
            objects[key] = set()
    return objects


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Prompts since the run began, at a commit."""

    step: int
    drawn: int
    trained: int
    filtered: int
    dropped: dict[str, int]
    in_flight: int
    recounted: bool  # borne out by the batches; False where they are removed, lost or damaged


def check_counts(
    store: Store,
    commit: Commit,
    before: Ledger,
    handed_on: BatchRef | None,
    cursor: Mapping[str, object] | None,
    batches: bool,
) -> Totals:
    """Compare a commit's ledger with its batches and its data cursor; ValueError where they differ.

    `before`, `cursor`: as they stood at the commit before (cursor None: at the data's beginning).
    `handed_on`: prompts of the groups that it carried on. `batches`: whether they are there to be
    counted.
    """
    after = commit.ledger
    prompts = after.drawn - before.drawn
    moved = _place(commit.cursor) - _place(cursor or {})
    passed = after.quarantined - before.quarantined
    if commit.cursor and moved != prompts + passed:
        over = f" and {passed} passed over" if passed else ""
        raise ValueError(
            f"Step {commit.step} counts {prompts} prompts drawn{over}, but its data cursor moved by "
            f"{moved}."
        )
    counted = {name: len(ref) for name, ref in commit.refs.items()}
    if commit.rows != counted:
        raise ValueError(
            f"Step {commit.step} says that its batches have {commit.rows} rows, but they have "
            f"{counted}."
        )
    if batches:
        _check_numbers(store, commit)
    if batches and {"prompts", "batch"} <= set(commit.refs):
        _recount(store, commit, before, prompts)
        if "tasks" in commit.cursor:
            _check_tasks(store, commit, cursor, passed)
        _check_members(store, commit, before, handed_on)
    return Totals(
        step=commit.step,
        drawn=after.drawn,
        trained=after.trained,
        filtered=after.filtered,
        dropped=dict(after.dropped),
        in_flight=after.in_flight,
        recounted=batches,
    )


def _check_numbers(store: Store, commit: Commit) -> None:
    """The numbers by which a sample's step is found are those of the batches; ValueError if not."""
    prompts, samples = commit.refs.get("prompts"), commit.refs.get("samples")
    if commit.first_group is not None and prompts is not None and len(prompts):
        groups = prompts.fetch_numpy(store, "group_id")[0]
        numbers = commit.first_group + np.arange(len(groups))
        if not np.array_equal(groups, numbers):
            raise ValueError(
                f"Step {commit.step} says that its groups are numbered from {commit.first_group}, "
                f"but its prompts are {groups[0]} to {groups[-1]}."
            )
    if commit.group_size is not None and samples is not None:
        groups = samples.fetch_numpy(store, "group_id")[0].astype(np.int64)
        ids = samples.fetch_numpy(store, "sample_id")[0].astype(np.int64)
        if not np.array_equal(ids // commit.group_size, groups):
            raise ValueError(
                f"Step {commit.step} says that its groups have {commit.group_size} samples, but the "
                "numbers of its samples are others."
            )


def _recount(store: Store, commit: Commit, before: Ledger, draws: int) -> None:
    prompts = len(commit.refs["prompts"])
    trained = len(np.unique(commit.refs["batch"].fetch_numpy(store, "group_id")[0]))
    counted = commit.ledger.trained - before.trained
    if trained != counted:
        raise ValueError(
            f"Step {commit.step} counts {counted} prompts trained, but its batch holds the samples "
            f"of {trained}."
        )
    unusable = sum(map(len, commit.dropped_rows.values()))
    names_rows = "dropped_rows" in commit.model_fields_set  # earlier commits did not name them
    if prompts > draws or (names_rows and prompts + unusable != draws):
        raise ValueError(
            f"Step {commit.step} counts {draws} prompts drawn, but stored {prompts} and named "
            f"{unusable} that it dropped."
        )
    samples = commit.refs.get("samples")
    if samples is not None:
        ids = samples.fetch_numpy(store, "sample_id")[0]
        used = commit.refs["batch"].fetch_numpy(store, "sample_id")[0]
        if len(np.unique(ids)) != len(ids) or not np.isin(used, ids).all():
            raise ValueError(
                f"Step {commit.step} trained samples twice, or some that it did not draw."
            )


def _check_members(
    store: Store, commit: Commit, before: Ledger, handed_on: BatchRef | None
) -> None:
    """Each group that a step drew, or was handed, was sampled for its batch, dropped or handed on."""
    samples, carried = commit.refs.get("samples"), commit.refs.get("carried")
    if samples is None:
        return
    there = [ref for ref in (handed_on, commit.refs["prompts"]) if ref is not None]
    try:
        had = np.concatenate([ref.fetch_numpy(store, "group_id")[0] for ref in there])
    except ObjectMissing:  # retention removed a prompt that was handed on and then dropped
        return
    members = np.unique(samples.fetch_numpy(store, "group_id")[0])
    on = np.empty(0, np.int64) if carried is None else carried.fetch_numpy(store, "group_id")[0]
    groups = np.concatenate([members, on])
    if len(np.unique(groups)) != len(groups) or not np.isin(groups, had).all():
        raise ValueError(
            f"Step {commit.step} has groups in its batch, or hands groups on, that it neither drew "
            "nor was handed, or does both with one."
        )
    if len(on) != commit.ledger.in_flight:
        raise ValueError(
            f"Step {commit.step} counts {commit.ledger.in_flight} prompts in flight, and hands "
            f"{len(on)} on."
        )
    reasons = ("over_sampled", "overdue")  # dropped without being part of the batch
    dropped = sum(
        commit.ledger.dropped.get(reason, 0) - before.dropped.get(reason, 0) for reason in reasons
    )
    if len(had) != len(groups) + dropped:
        raise ValueError(
            f"Step {commit.step} had {len(had)} groups, of which {len(members)} are in its batch, "
            f"{dropped} dropped and {len(on)} handed on."
        )


def _check_tasks(
    store: Store, commit: Commit, cursor: Mapping[str, object] | None, passed: int
) -> None:
    """Each task's own place moved by the rows that were drawn of it; ValueError if not.

    passed: rows that the draw passed over, which count for no task here: they are not named.
    """
    after, names = _tasks(commit.cursor), commit.refs["prompts"].fetch_list(store, TASK)
    first = 0
    for name, place in after.items():
        rows = range(first, first + int(place["size"]))
        first = rows.stop
        dropped = sum(row in rows for many in commit.dropped_rows.values() for row in many)
        count = names.count(name) + dropped
        moved = _place(place) - _place(_tasks(cursor or {}).get(name, {}))
        if not count <= moved <= count + passed:
            raise ValueError(
                f"Step {commit.step} drew {count} rows of the task {name}, but the task's place in "
                f"its data moved by {moved}."
            )


def _tasks(cursor: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """The places of a run's tasks, by name; none where it has one."""
    return dict(sorted(cast("dict[str, dict[str, Any]]", cursor.get("tasks", {})).items()))


def _place(cursor: Mapping[str, object]) -> int:
    """Rows drawn since the data's beginning."""
    if tasks := _tasks(cursor):
        return sum(map(_place, tasks.values()))
    numbers = cast("Mapping[str, Any]", cursor)
    size, position = int(numbers.get("size", 0)), int(numbers.get("position", 0))
    epoch, fresh = int(numbers.get("epoch", 0)), int(numbers.get("fresh", 0))
    # A run that goes on with unseen rows first has only those in its first epoch.
    return position if epoch == 0 else (fresh or size) + (epoch - 1) * size + position


def check_samples(run: RunStore, commit: Commit, digests: dict[int, str | None]) -> None:
    """Whether each sample's engine held the weights that its token spans name; ValueError if not.

    digests: of the versions by the commits, None for one that none names; filled in as they are met.
    """
    samples = commit.refs.get("samples")
    if samples is None or not {"weights_digest", "weight_spans"} <= set(samples.names):
        return
    if "frozen" in samples.names:
        _check_opponent(run, commit, samples)
        samples = samples.of_policy(run.store)
    for version, content in _held(run.store, samples):
        if version not in digests:
            digests[version] = _digest_of(run, version)
        expected = digests[version]
        if expected is not None and content != expected:
            raise ValueError(
                f"Samples of step {commit.step} name policy version {version}, whose digest is "
                f"{expected}, but their engine held {content}."
            )


def _held(store: Store, samples: BatchRef) -> list[tuple[int, str]]:
    """Versions that wrote the samples' last tokens, each with the digests that engines had of it."""
    spans, offsets = samples.fetch_numpy(store, "weight_spans")
    digests = samples.fetch_list(store, "weights_digest")
    assert offsets is not None
    wrote = np.diff(offsets) > 0  # one of several players may have had no turn
    last = spans[offsets[1:][wrote] - 3]
    told = [digest for digest, any_ in zip(digests, wrote, strict=True) if any_]
    return sorted({(int(v), str(d)) for v, d in zip(last, told, strict=True)})


def _check_opponent(run: RunStore, commit: Commit, samples: BatchRef) -> None:
    """Whether the opponent's samples are of its version, and none of them trained; ValueError."""
    opponent = opponent_of(run)
    frozen = samples.take(np.flatnonzero(samples.fetch_numpy(run.store, "frozen")[0]))
    expected = (opponent.weights.version, opponent.weights.digest)
    for holder in _held(run.store, frozen):
        if holder != expected:
            raise ValueError(
                f"Samples of the opponent in step {commit.step} were written by version {holder[0]} "
                f"with digest {holder[1]}, and the opponent is {opponent} with {expected[1]}."
            )
    ids, used = (
        ref.fetch_numpy(run.store, "sample_id")[0] for ref in (frozen, commit.refs["batch"])
    )
    if np.isin(ids, used).any():
        raise ValueError(f"Step {commit.step} trained samples of the opponent.")


def _digest_of(run: RunStore, version: int) -> str | None:
    """The digest of a version by the commits; None for one that no commit names."""
    if version == start_of(run):  # a fork may have made its parent's version anew
        first = read_outline(run, version + 1).version_in
        return first.digest if first.version == version else None
    try:
        owner, step = committer(run, version)
    except ValueError:
        return None
    return read_outline(owner, step).version_out.digest


def check_evaluation(
    run: RunStore,
    suite: str,
    version: int,
    key: str,
    digests: Mapping[int, str | None],
    read: Read,
) -> None:
    """Read an evaluation whole. Raises ObjectMissing, ObjectDamaged, ValueError for a contradiction.

    key: of its result, which the run names as that of a suite on a version. digests: of the run's
    versions, as its commits say.
    """
    result = read_result(run.store, key)
    read.count(key, run.store.size(key))
    name = f"The evaluation of {suite} on version {version} of {run.run}"
    expected = digests.get(version)
    if expected is not None and result.weights.digest != expected:
        raise ValueError(
            f"{name} measured weights {result.weights.digest}, and the version has {expected}."
        )
    for source in sources_in((result.prompts, result.samples)).values():
        check_batch(run.store, source, read)
    _check_samples(run, name, result)


def _check_samples(run: RunStore, name: str, result: EvaluationResult) -> None:
    """Counts, mean, and the weights that each sample was drawn with."""
    samples = result.samples.of_policy(run.store)
    rewards, status = (samples.fetch_numpy(run.store, column)[0] for column in ("reward", "status"))
    failed = np.isnan(rewards)
    if not (failed == (status == SampleStatus.FAILED)).all():
        raise ValueError(f"{name} has samples that failed and have a reward, or the reverse.")
    counted = {"samples": len(rewards), "failed": int(failed.sum())}
    for metric, count in counted.items():
        if result.metrics.get(metric) != count:
            raise ValueError(
                f"{name} says {metric} = {result.metrics.get(metric)}, and its samples are {count}."
            )
    digests = set(samples.fetch_list(run.store, "weights_digest"))
    if digests != {result.weights.digest}:
        raise ValueError(
            f"{name} is of weights {result.weights.digest}, and samples were drawn with "
            f"{', '.join(sorted(map(str, digests - {result.weights.digest})))}."
        )
    recorded, mean = result.metrics.get("reward"), _mean(rewards, samples, run)
    if mean is not None and (recorded is None or abs(mean - recorded) > 1e-9):
        raise ValueError(f"{name} says reward = {recorded}, and its samples {mean}.")


def _mean(rewards: NDArray[Any], samples: BatchRef, run: RunStore) -> float | None:
    """Mean over prompts of the mean of their scored samples; rewards: [N]."""
    scored = ~np.isnan(rewards)
    if not scored.any():
        return None
    rows = samples.fetch_numpy(run.store, "prompt_row")[0][scored]
    _, place = np.unique(rows, return_inverse=True)
    sums = np.bincount(place, weights=rewards[scored].astype(np.float64))
    return float((sums / np.bincount(place)).mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that is not as the run's records say."""

    kind: str  # chain, ledger, batch, sample, weights, state, origin, evaluation
    step: int | None  # of the commit or snapshot that is concerned
    message: str  # one sentence


@dataclass(kw_only=True, slots=True)
class Audit:
    """The findings; filled while the audit goes on."""

    run: str
    origin: str | None = None  # RUN@STEP
    steps: list[Totals] = field(default_factory=list)  # the counts at every commit
    problems: list[Problem] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)  # keys that nothing names
    unfinished: list[str] = field(default_factory=list)  # keys of work that is not committed
    removed: int = 0  # batch objects that retention removed
    without: set[int] = field(default_factory=set)  # the steps whose they were
    versions: int = 0  # policy versions that are there and good
    snapshots: int = 0
    evaluations: int = 0  # of versions, that are there and good
    read: Read = field(default_factory=Read)

    @property
    def good(self) -> bool:
        return not self.problems

    @contextmanager
    def noting(self, kind: str, step: int | None = None) -> Iterator[None]:
        """Make a problem of an error in the body."""
        try:
            yield
        except (StoreError, ValueError) as error:
            message = " ".join(str(error).split())
            self.problems.append(Problem(kind=kind, step=step, message=message))


@dataclass(kw_only=True, slots=True)
class _Chain:
    """What is kept of the commits while one after the other is read."""

    head: int  # the last one that could be read; before it, where the run begins
    first: Commit | None = None  # of the run's own
    last: Commit | None = None
    versions: dict[str, WeightsRef] = field(default_factory=dict)  # that they name, by key
    digests: dict[int, str | None] = field(default_factory=dict)  # of versions that samples name

    def add(self, commit: Commit) -> None:
        if self.first is None:
            self.first = commit
        self.last, self.head = commit, commit.step
        for ref in (commit.version_in, commit.version_out):
            self.versions[ref.key] = ref
        self.digests.setdefault(commit.version_out.version, commit.version_out.digest)


def audit(run: RunStore) -> Audit:
    """Check a run from its first commit to its last. Raises StoreError for an unreadable run.json.

    Every commit and every object is read, one step at a time: what is kept meanwhile are names.
    """
    run = replace(run, store=run.store.with_cache(CACHE_BYTES))
    origin = origin_of(run)
    report = Audit(run=run.run, origin=None if origin is None else str(origin))
    chain = _Chain(head=0 if origin is None else origin.at)
    live_keys: set[str] = set()
    gone_below = batches_below(run)
    before, handed_on = _ledger_before(run, origin, report), _carried_before(run, origin)
    cursor: Mapping[str, object] | None = _cursor_before(run, origin)
    for commit in _commits(run, origin, report):
        chain.add(commit)
        there = _batches(run, commit, report, live_keys, gone_below)
        with report.noting("ledger", commit.step):
            totals = check_counts(run.store, commit, before, handed_on, cursor, there)
            report.steps.append(totals)
        before, handed_on, cursor = commit.ledger, commit.refs.get("carried"), commit.cursor
        if there:
            with report.noting("sample", commit.step):
                check_samples(run, commit, chain.digests)
    _versions(run, chain, report, live_keys)
    _opponent(run, report)
    with report.noting("evaluation"):
        for suite, version, key in notes_of(run).values():
            with report.noting("evaluation", version):
                check_evaluation(run, suite, version, key, chain.digests, report.read)
                report.evaluations += 1
    _snapshots(run, chain.head, report, live_keys)
    if origin is not None:
        _shared(run, origin, chain, report)
    _leftovers(run, chain.head, report, live_keys)
    return report


def _commits(run: RunStore, origin: Origin | None, report: Audit) -> Iterator[Commit]:
    """Every commit that can be read; each must follow the one before it, and HEAD the last."""
    start = 0 if origin is None else origin.at
    expected = None
    if origin is not None:
        expected = origin.commit_digest
        with report.noting("origin"):
            parents = read_commit_digest(parent_of(run, origin), origin.step)
            if parents != expected:
                raise ValueError(f"The commit of {origin} was altered since {run.run} began there.")
    folders = reversed(run.steps())
    last = next((folder for folder in folders if run.store.exists(run.commit_key(folder))), start)
    for step in range(start + 1, last + 1):
        actual = record = None
        with report.noting("chain", step):
            data = run.store.read(run.commit_key(step))
            actual = digest(data)
            record = parse_commit(run, step, data)
            if expected is not None and record.parent_digest != expected:
                raise ValueError(
                    f"Object {run.commit_key(step - 1)} was altered: its digest is {expected}, "
                    f"the next commit says {record.parent_digest}."
                )
        if record is not None:  # out of its chain, it can still be looked at
            yield record
        expected = actual
    with report.noting("chain"):
        _head(run, last, expected, start)


def _head(run: RunStore, last: int, expected: str | None, start: int) -> None:
    """HEAD may lag behind a commit whose writer died, but names a commit that is there."""
    try:
        body = documents.read(run.store, run.head_key, HEAD_FORMAT)
    except ObjectMissing:
        if last > start:
            raise
        return
    if body["step"] == last and body["commit_digest"] != expected:
        raise ValueError(
            f"Object {run.commit_key(last)} was altered: its digest is {expected}, HEAD says "
            f"{body['commit_digest']}."
        )
    if not isinstance(body["step"], int) or body["step"] > last:
        raise ValueError(f"HEAD names step {body['step']}, but the last commit is of step {last}.")


def _ledger_before(run: RunStore, origin: Origin | None, report: Audit) -> Ledger:
    if origin is not None and origin.fork:
        with report.noting("origin"):
            ledger = read_commit(parent_of(run, origin), origin.step).ledger
            return ledger if origin.cursor else ledger.settled()
    return Ledger()


def _carried_before(run: RunStore, origin: Origin | None) -> BatchRef | None:
    """The prompts of the groups that are handed on to the run's first step."""
    if origin is None or not (origin.fork and origin.cursor):
        return None
    return read_commit(parent_of(run, origin), origin.step).refs.get("carried")


def _cursor_before(run: RunStore, origin: Origin | None) -> dict[str, object] | None:
    """Where the data stood before the first step: None for their beginning."""
    if origin is None or not origin.cursor:
        return None
    return dict(read_commit(parent_of(run, origin), origin.step).cursor)


def _batches(
    run: RunStore, commit: Commit, report: Audit, live_keys: set[str], gone_below: int
) -> bool:
    """Read every object that a commit names; returns whether all are there and good."""
    good = True
    live_keys.update(() if commit.lists is None else (commit.lists.key,))
    for key, source in sources_of(commit).items():
        live_keys.add(key)
        before = len(report.problems)
        with report.noting("batch", commit.step):
            try:
                check_batch(run.store, source, report.read)
            except ObjectMissing:
                if commit.step >= gone_below:
                    raise
                report.removed += 1
                report.without.add(commit.step)
                good = False
        good = good and len(report.problems) == before
    return good


def _versions(run: RunStore, chain: _Chain, report: Audit, live_keys: set[str]) -> None:
    """Every version that is there, and those that must be: the last commit's and children's."""
    must = {pin.step for pin in pins(run) if pin.weights}
    must |= {chain.last.version_out.version} if chain.last is not None else set()
    there = set()
    for number in run.versions():
        key = run.weights_key(number)
        if run.store.exists(f"{key}/{MANIFEST}"):
            there.add(number)
            with report.noting("weights", number):
                live_keys.update(
                    check_version(run.store, key, chain.versions.get(key), report.read)
                )
                report.versions += 1
    for key in base_keys(run):  # also one on which no adapter has been kept
        with report.noting("weights"):
            live_keys.update(check_version(run.store, key, None, report.read))
    for number in sorted(must - there):
        message = f"Policy version {number} of run {run.run} is missing: there is no manifest."
        report.problems.append(Problem(kind="weights", step=number, message=message))


def _opponent(run: RunStore, report: Audit) -> None:
    """Whether the version of another run that plays against this one is there and good."""
    with report.noting("origin"):
        opponent = recorded_opponent(run)
        if opponent is None:
            return
        try:
            check_version(run.store, opponent.weights.key, opponent.weights, report.read)
        except ObjectMissing as error:
            raise ValueError(
                f"The weights of {opponent}, the opponent of {run.run}, are gone: {error}."
            ) from error


def _snapshots(run: RunStore, head: int, report: Audit, live_keys: set[str]) -> None:
    for step, folder in state_folders(run):
        if run.store.exists(f"{folder}/marker.json"):
            live_keys.update(run.store.list(folder) if step > head else ())
            with report.noting("state", step):
                live_keys.update(check_snapshot(run, folder, report.read))
                report.snapshots += 1


def _shared(run: RunStore, origin: Origin, chain: _Chain, report: Audit) -> None:
    """What a child needs of its parent: the weights that it sampled with first, and a state.

    A child that trains on from a state does without the weights, where retention had removed them.
    """
    first = chain.first
    shared = first is not None and first.version_in.key == origin.weights.key
    if shared or not origin.trainer_state:
        with report.noting("origin"):
            try:
                check_version(run.store, origin.weights.key, origin.weights, report.read)
            except ObjectMissing as error:
                raise ValueError(
                    f"The weights of {origin}, which {run.run} shares, are gone: {error}."
                ) from error
    has_snapshot = any(origin.at <= step <= chain.head for step, _ in state_folders(run))
    if has_snapshot or not origin.trainer_state:
        return
    with report.noting("origin"):
        try:
            check_state(parent_of(run, origin), origin.step)
        except ObjectMissing as error:
            raise ValueError(
                f"The trainer state of {origin}, which {run.run} needs, is gone: {error}."
            ) from error


def _leftovers(run: RunStore, head: int, report: Audit, live_keys: set[str]) -> None:
    """Sort what no record names into work under way and orphans."""
    damaged = {key for key in live_keys if key not in report.read.done}
    everything = run.store.list(run.run)
    markers = [key for key in everything if _is_marker(run, key)]
    damaged.update(key for key in markers if _data_of(key) in live_keys)
    # The data of others may be under a name of its own, which only the marker knows.
    others = [key for key in markers if key not in damaged]
    for marker, named in marked_objects(run.store, others).items():
        if not named.isdisjoint(live_keys):
            damaged.add(marker)
    for key in everything:
        top, *rest = key.removeprefix(f"{run.run}/").split("/")
        of_run = (not rest and top in RECORDS) or top in FOLDERS or rest[1:] == ["commit.json"]
        if of_run or key in live_keys or key in damaged or _part_of_bad(key, report):
            continue
        of_version = top == "weights" and of_registration("/".join(rest[1:]))
        if of_version and f"{run.run}/weights/{rest[0]}/{MANIFEST}" in live_keys:
            continue
        number = rest[0].removeprefix("v") if rest else ""
        later = number.isascii() and number.isdigit() and int(number) > head
        (report.unfinished if later else report.orphans).append(key)


def _is_marker(run: RunStore, key: str) -> bool:
    """Whether a key is that of a stage's marker."""
    steps = key.startswith(f"{run.run}/steps/")
    return steps and key.endswith(".json") and not run.is_record(key)


def _data_of(marker: str) -> str:
    return marker.removesuffix(".json") + DATA_SUFFIX


def _part_of_bad(key: str, report: Audit) -> bool:
    """Whether a file belongs to a version or snapshot that a problem names already."""
    folders = {"weights": "/weights/v{:06d}/", "state": "/state/{:06d}/"}
    return any(
        problem.kind in folders
        and problem.step is not None
        and folders[problem.kind].format(problem.step) in key
        for problem in report.problems
    )
