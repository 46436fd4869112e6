"""The audit of a run: is everything that it says true, still there, and accounted for?

Read only. Problems are contradictions: an altered commit, a count that the stored batches do not
bear out, an object that is missing or damaged. Orphans are objects that nothing names: they cost
room and nothing else. What retention removed is neither. The counts are in audit_ledger.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from storage.audit.audit_evaluations import check_evaluation
from storage.audit.audit_ledger import Totals, check_counts, check_samples
from storage.audit.audit_objects import (
    Read,
    check_batch,
    check_snapshot,
    check_version,
    marked_objects,
    sources_of,
    state_folders,
)
from storage.batches.refs import BatchRef
from storage.evaluations.files import NOTES
from storage.evaluations.results import notes_of
from storage.objects import documents
from storage.objects.documents import digest
from storage.objects.errors import ObjectMissing, StoreError
from storage.runs.adapters import base_keys
from storage.runs.commit_log import (
    HEAD_FORMAT,
    Commit,
    Ledger,
    parse_commit,
    read_commit,
    read_commit_digest,
)
from storage.runs.forks import check_state
from storage.runs.live import PROGRESS_NAME as PROGRESS
from storage.runs.opponents import recorded_opponent
from storage.runs.retention import batches_below, pins
from storage.runs.run_store import DATA_SUFFIX, Origin, RunStore, origin_of, parent_of
from storage.runs.seen_rows import ROWS, SEEN
from storage.runs.weights import MANIFEST, WeightsRef

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
