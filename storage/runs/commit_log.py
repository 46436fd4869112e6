"""Commits: what each RL step took in and put out. A step counts only once it is committed.

The one atomic write is the creation of `steps/<step>/commit.json`: of two writers exactly one
succeeds. HEAD follows by compare-and-swap and is brought up to date by whoever reads it, should a
writer die between the two. Each commit holds the digest of its parent, so the chain cannot be
altered unseen.

The lists of a commit grow with its step: a step of thousands of samples has refs and attempts of
hundreds of entries. Where they are long, commit.json names `lists-<digest>.json` beside it, by key
and digest, so that who needs one number of a step reads one small object, and the chain of commits
vouches for the lists all the same. They are written before the commit that names them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self, cast

from pydantic import Field, JsonValue, field_validator, model_validator

from storage.batches.refs import BatchRef
from storage.objects import documents
from storage.objects.backends import StoredKey
from storage.objects.documents import PREFIX, StoredRecord, digest
from storage.objects.errors import Conflict, ObjectDamaged, ObjectMissing, StoreError
from storage.runs.run_lease import RunLease
from storage.runs.run_store import RunStore, origin_of, start_of
from storage.runs.weights import WeightsRef

LISTS_FORMAT = "refrain.commit-lists/1"
LISTS = ("refs", "carried", "dropped_rows", "attempts")  # of a commit
INLINE_BYTES = 64 * 2**10  # lists of so many bytes stay in commit.json, which is one read less

log = logging.getLogger(__name__)

FORMAT = "refrain.commit/2"
HEAD_FORMAT = "refrain.head/1"
HEAD_ATTEMPTS = 8


class ListsRef(StoredRecord):
    """Where the lists of a commit are."""

    key: StoredKey  # relative to the store
    digest: str  # of the object's bytes
    nbytes: int


def _detach(run: RunStore, step: int, body: Mapping[str, object]) -> dict[str, object]:
    """The body of a commit as commit.json has it; long lists are stored beside it."""
    lists = {name: body[name] for name in LISTS}
    data = documents.encode(LISTS_FORMAT, lists, indent=None)
    if len(data) <= INLINE_BYTES:
        return dict(body)
    lists_digest = digest(data)
    ref = ListsRef(
        key=run.lists_key(step, lists_digest.removeprefix(PREFIX)),
        digest=lists_digest,
        nbytes=len(data),
    )
    run.store.create(ref.key, data)  # an object of that name has these bytes
    short = {name: value for name, value in body.items() if name not in LISTS}
    return {**short, "lists": ref.model_dump()}


def attach(run: RunStore, key: str, body: Mapping[str, object]) -> dict[str, object]:
    """The body of the commit `key`, with its lists. Raises ObjectMissing, ObjectDamaged."""
    if body.get("lists") is None:
        return dict(body)
    ref = documents.validated(ListsRef, key, cast("Mapping[str, object]", body["lists"]))
    data = run.store.read(ref.key)
    if digest(data) != ref.digest:
        raise ObjectDamaged(
            f"Object {ref.key} is damaged: its digest is {digest(data)}, {key} says {ref.digest}."
        )
    lists = documents.decode(LISTS_FORMAT, ref.key, data)
    return {**body, **{name: lists[name] for name in LISTS if name in lists}}


class Ledger(StoredRecord):
    """Prompts since the run began, by what became of them. The counts always balance."""

    drawn: int = Field(default=0, ge=0)  # taken from the dataset
    trained: int = Field(default=0, ge=0)  # whose groups were part of an update
    filtered: int = Field(default=0, ge=0)  # left out on purpose, such as groups of equal rewards
    # Those of `filtered`, by the rule that left them out; an older Refrain did not say.
    filtered_by: dict[str, int] = Field(default_factory=dict)
    dropped: dict[str, int] = Field(default_factory=dict)  # failed or not wanted, by reason
    in_flight: int = Field(default=0, ge=0)  # whose groups are carried to the next step
    # Rows in quarantine that draws passed over; they were not drawn, so no part of the balance.
    quarantined: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _balances(self) -> Self:
        wrong = {reason: count for reason, count in self.dropped.items() if count < 0}
        if min(self.filtered_by.values(), default=0) < 0 or (
            sum(self.filtered_by.values()) > self.filtered
        ):
            raise ValueError(
                f"The ledger does not balance: {self.filtered} prompts filtered, but by rule "
                f"{self.filtered_by}."
            )
        accounted = self.trained + self.filtered + sum(self.dropped.values()) + self.in_flight
        if wrong or accounted != self.drawn:
            raise ValueError(
                f"The ledger does not balance: {self.drawn} prompts drawn, but {self.trained} "
                f"trained + {self.filtered} filtered + {self.dropped} dropped + {self.in_flight} "
                f"in flight = {accounted}."
            )
        return self

    def settled(self) -> Ledger:
        """Without what is in flight: for a run that begins here and does not take that over."""
        return self.model_copy(update={"drawn": self.drawn - self.in_flight, "in_flight": 0})


class CarriedGroup(StoredRecord):
    """A group that a step drew, or was handed, and hands on to the next one."""

    since: int  # step that drew it
    begun: bool  # whether there are tokens to go on from, in refs["begun"]
    oldest: int | None = None  # policy version of its oldest token
    # Its samples in refs["begun"], where groups differ in size; None: it has as many as the others.
    samples: int | None = None


class GuardRecord(StoredRecord):
    """What a guard found after a step, and where it stands: its next verdict goes on from this."""

    guard: str  # its name
    metric: str
    value: float | None  # of the step; None: it has none, or none that is a finite number
    threshold: float | None  # in the metric's unit; None: one by the mean that is not known yet
    crossed: bool = False  # whether the step was beyond it
    beyond: int = Field(default=0, ge=0)  # steps in a row beyond the threshold, this one included
    within: int = Field(default=0, ge=0)  # steps in a row within it
    armed: bool = True  # whether it may act; not after a warning, until enough steps were within
    mean: float | None = None  # running mean of the values within the threshold
    seen: int = Field(default=0, ge=0)  # how many values that is of
    action: str | None = None  # that follows from this step: warn, synchronous, stop, rollback
    # Of a rollback: the step that the run goes on from, and the settings that change, as key=value.
    back_to: int | None = None
    change: list[str] = Field(default_factory=list)


class Outline(StoredRecord):
    """What a step was, but for its long lists: what commit.json alone says of it."""

    step: int = Field(ge=1)  # counted from 1; its update makes policy version `step`
    parent: int = Field(ge=0)  # the step before; 0 for the first of a run
    parent_run: str | None = None  # where that was committed, if in another run; see `commit`
    algorithm: dict[str, JsonValue] = Field(default_factory=dict)  # its settings
    version_in: WeightsRef  # that sampled; the oldest of them, under max_staleness
    version_out: WeightsRef  # that the update made
    cursor: dict[str, JsonValue] = Field(default_factory=dict)  # the dataset's, after the step
    rng: dict[str, JsonValue] = Field(default_factory=dict)  # seeds and generator states
    ledger: Ledger = Field(default_factory=Ledger)
    rows: dict[str, int] = Field(default_factory=dict)  # of each of its refs; filled in by `commit`
    first_group: int | None = None  # number of the first group that it drew; None: not recorded
    # Samples of a prompt, at most: prompt g has sample_ids g * size + k.
    group_size: int | None = None
    # Requests to readmit rows that its draw took account of, counted from 1 (readmissions.py).
    readmissions: int = Field(default=0, ge=0)
    # What scored the samples, by the digest in their column reward_code: a record per function.
    reward_code: dict[str, list[dict[str, JsonValue]]] = Field(default_factory=dict)
    # Versions of what scorers, and greedy evaluation, meant (engines/meanings.py); {} of an older
    # Refrain's, which are all the first.
    meanings: dict[str, int] = Field(default_factory=dict)
    # Files of users' functions that score or play, by label (tasks/run/meaning_changes.py): sha256.
    code_files: dict[str, str] = Field(default_factory=dict)
    # What the update was made with besides the algorithm: settings, seed, ranks.
    update: dict[str, JsonValue] = Field(default_factory=dict)
    metrics: dict[str, float | None] = Field(default_factory=dict)  # None: not a finite number
    guards: list[GuardRecord] = Field(default_factory=list)  # verdicts on the step, by guard
    epoch: int = 0  # fencing token of the lease under which it was made
    committed_at: float = Field(default_factory=time.time)  # seconds since 1970
    parent_digest: str | None = None  # of the parent's commit.json; filled in by `commit`
    lists: ListsRef | None = None  # where its lists are; None: in commit.json

    @field_validator("metrics")
    @classmethod
    def _finite(cls, metrics: dict[str, float | None]) -> dict[str, float | None]:
        """JSON knows no NaN and no infinity."""
        return {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in metrics.items()
        }

    @model_validator(mode="after")
    def _follows(self) -> Self:
        if self.parent != self.step - 1:
            raise ValueError(f"Step {self.step} cannot follow step {self.parent}.")
        return self


class Commit(Outline):
    """The record of one step. With the snapshot before it and its refs the step can be redone."""

    refs: dict[str, BatchRef] = Field(default_factory=dict)  # in and out, by name: prompts, batch…
    # Groups that go on in the next step. Their prompts are refs["carried"], in this order; the
    # samples of those that are begun are refs["begun"], as many for each. refs["samples"] has the
    # members of the step's own batch.
    carried: list[CarriedGroup] = Field(default_factory=list)
    # Rows of the dataset that the step drew and could not use, by reason.
    dropped_rows: dict[str, list[int]] = Field(default_factory=dict)
    # Of its tasks, as they ended.
    attempts: list[dict[str, JsonValue]] = Field(default_factory=list)

    @property
    def objects(self) -> frozenset[str]:
        """Keys of every batch object that the commit names."""
        return frozenset(key for ref in self.refs.values() for key in ref.objects)


def commit(run: RunStore, record: Commit, lease: RunLease | None = None) -> Commit:
    """Commit a step: create its commit.json, then move HEAD. Returns the commit as stored.

    `record.parent` must be the last committed step. Committing the same record again is a no-op,
    so a retry after a lost answer is safe. With a lease, that is checked against the store first.
    Raises Conflict when another writer committed the step; nothing changes then.
    """
    if lease is not None:
        lease.check()
        record = record.model_copy(update={"epoch": lease.epoch})
    origin = origin_of(run)
    start = 0 if origin is None else origin.at
    current = head(run) or start
    if current >= record.step:
        return _same(run, record)
    if current != record.parent:
        raise Conflict(
            f"Step {record.step} of run {run.run} follows step {record.parent}, but the last "
            f"committed step is {current}."
        )
    if current > start:
        record = record.model_copy(update={"parent_digest": read_commit_digest(run, current)})
    elif origin is not None:
        followed = {"parent_digest": origin.commit_digest, "parent_run": origin.run}
        record = record.model_copy(update=followed)
    counts = {name: len(ref) for name, ref in record.refs.items()}
    record = record.model_copy(update={"rows": counts})
    body = _detach(run, record.step, record.model_dump(mode="json"))
    data = documents.encode(FORMAT, body)
    if not run.store.create(run.commit_key(record.step), data):
        return _same(run, record)
    _advance(run, record.step, digest(data))
    lists = None if body["lists"] is None else ListsRef.model_validate(body["lists"])
    return record.model_copy(update={"lists": lists})


def _same(run: RunStore, record: Commit) -> Commit:
    """The stored commit of the step, if it says the same as `record`."""
    stored = read_commit(run, record.step)
    # How long it took, and which attempts, is not what a step did: a commit that is tried again
    # after an answer was lost measures anew.
    incidental = {"committed_at", "epoch", "parent_digest", "parent_run", "metrics", "attempts"}
    incidental |= {"rows", "lists", "guards"}  # they follow from the rest
    if stored.model_dump(mode="json", exclude=incidental) != record.model_dump(
        mode="json", exclude=incidental
    ):
        raise Conflict(
            f"Step {record.step} of run {run.run} is already committed with other results, "
            f"by the writer of epoch {stored.epoch}."
        )
    head(run)
    return stored


def head(run: RunStore) -> int | None:
    """The run's last committed step; None before its first.

    A commit whose writer died before it moved HEAD is found, and HEAD moved for it.
    """
    start = start_of(run)
    step = max(_read_head(run).step, start)
    while True:
        try:
            commit_digest = read_commit_digest(run, step + 1)
        except ObjectMissing:  # it is not committed
            return step if step > start else None
        step += 1
        _advance(run, step, commit_digest)


@dataclass(frozen=True, slots=True)
class _Head:
    step: int  # 0 before the first
    commit_digest: str  # of the step's commit.json
    data: bytes | None  # of HEAD itself; None before the first step


def _read_head(run: RunStore) -> _Head:
    try:
        data = run.store.read(run.head_key)
    except ObjectMissing:
        return _Head(0, "", None)
    body = documents.decode(HEAD_FORMAT, run.head_key, data)
    step, commit_digest = body.get("step"), body.get("commit_digest")
    if not isinstance(step, int) or not isinstance(commit_digest, str):
        raise ObjectDamaged(f"Object {run.head_key} names no step.")
    return _Head(step, commit_digest, data)


def read_commit_digest(run: RunStore, step: int) -> str:
    """The digest of a step's commit.json. Raises ObjectMissing."""
    return digest(run.store.read(run.commit_key(step)))


def _advance(run: RunStore, step: int, commit_digest: str) -> None:
    """Move HEAD on to `step`, unless another process has moved it that far or further."""
    data = documents.encode(HEAD_FORMAT, {"step": step, "commit_digest": commit_digest})
    for _ in range(HEAD_ATTEMPTS):
        current = _read_head(run)
        if current.step >= step:
            return
        try:
            run.store.replace(run.head_key, data, current.data)
        except Conflict:
            continue
        return
    raise StoreError(f"HEAD of run {run.run} keeps changing; is another process committing?")


def read_commit(run: RunStore, step: int) -> Commit:
    """The commit of a step. Raises ObjectMissing, ObjectDamaged; logs fields that are unknown."""
    return parse_commit(run, step, run.store.read(run.commit_key(step)))


def read_outline(run: RunStore, step: int) -> Outline:
    """The commit of a step without its lists: one small read. Raises as `read_commit` does."""
    key = run.commit_key(step)
    return documents.validated(Outline, key, _body(run, step, run.store.read(key)))


def version_weights(run: RunStore, version: int) -> WeightsRef:
    """The policy version that a step made, or that the run began with, by the commits."""
    if version == start_of(run):
        return read_outline(run, version + 1).version_in
    return read_outline(run, version).version_out


def _body(run: RunStore, step: int, data: bytes) -> dict[str, object]:
    """The body of a step's commit.json, as this version writes it."""
    key = run.commit_key(step)
    body = documents.decode_version(READERS, key, data)
    if unknown := sorted(set(body) - set(Commit.model_fields)):
        log.warning("%s has fields that this version does not know: %s", key, ", ".join(unknown))
    if body.get("step") != step:
        raise ObjectDamaged(f"Object {key} is the commit of step {body.get('step')}.")
    return body


def parse_commit(run: RunStore, step: int, data: bytes) -> Commit:
    """The commit of a step from the bytes of its commit.json. Raises as `read_commit` does."""
    key = run.commit_key(step)
    body = attach(run, key, _body(run, step, data))
    return documents.validated(Commit, key, body)


def _from_version_1(body: dict[str, object]) -> dict[str, object]:
    """Version 1 had its lists within, however long, and counted no rows."""
    refs = cast("Mapping[str, Mapping[str, object]]", body.get("refs") or {})
    return {**body, "rows": {name: ref.get("rows", 0) for name, ref in refs.items()}}


READERS: dict[str, documents.Reader] = {FORMAT: dict, "refrain.commit/1": _from_version_1}


def history(run: RunStore) -> Iterator[Commit]:
    """The run's commits from HEAD back to its first, each checked against the one after it.

    Raises ObjectDamaged naming the commit that is not the one its successor (or HEAD) followed.
    """
    start = start_of(run)
    head(run)
    newest = _read_head(run)
    step, expected = newest.step, newest.commit_digest
    while step > start:
        data = run.store.read(run.commit_key(step))
        if digest(data) != expected:
            raise ObjectDamaged(
                f"Object {run.commit_key(step)} was altered: its digest is {digest(data)}, "
                f"its successor or HEAD says {expected}."
            )
        record = parse_commit(run, step, data)
        yield record
        step, expected = record.parent, record.parent_digest or ""
