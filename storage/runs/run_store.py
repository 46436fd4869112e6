"""One run's part of the store: its keys, its settings, where it begins, and results of stages.

<run>/run.json, <run>/HEAD, <run>/weights/v000012/, <run>/state/000010/, <run>/critic/000010/,
<run>/steps/000012/<stage>/<shard>-<key>.safetensors and .json, <run>/steps/000012/commit.json and,
where that would be long, lists-<digest>.json

The result of a stage is data under a key of what it was made of, then a marker, which says that it
is finished: whoever wants the same again finds it there, after a failed attempt or a crash too. An
evaluation has results below its own key (storage/evaluations/results.py).

A run that begins at a committed step of another one has that origin in run.json. Nothing is copied:
the child's first commit names the parent's weights, its trainer loads the parent's snapshot, and
steps up to the origin are read from the parent. How an origin is made is in forks.py; what the
parent keeps for it, in retention.py.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from storage.objects import documents
from storage.objects.documents import StoredRecord
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.objects.store import Store
from storage.runs.weights import WeightsRef

if TYPE_CHECKING:
    from collections.abc import Iterator

# Functions of ours that recipes name by import path and that have moved.
MOVED = {"engines.scorers:share_of_digits": "engines.rewards.builtin:share_of_digits"}
# What a run does that began before there was a setting, where today's default does something else.
BEFORE: dict[str, dict[str, Any]] = {"store": {"keep_registered": None}}

STAGE_FORMAT = "refrain.stage/1"
DATA_SUFFIX = ".safetensors"

RUN_FORMAT = "refrain.run/2"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
VERSION_FOLDER = re.compile(r"v[0-9]+")
TRAINED_ROLES = ("actor", "critic")  # whose trainers have snapshots
FOLDERS = 64  # of steps and stages whose listings are kept
LISTS = "lists-"  # how the name of an object with the lists of a commit begins

ORIGIN_FIELD = "origin"  # of run.json


def upgraded_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run that was stored by version 1 of run.json."""
    new = renamed_settings(settings)
    new.get("rollout", {}).pop("shards_in_flight", None)  # cluster.pools.NAME.slots bounds them
    for function in new.get("rewards", {}).get("functions", []):
        if function.get("path") in MOVED:
            function["path"] = MOVED[function["path"]]
    return new


def renamed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as version 2 of run.json has them: what has another name or form by now has that, and
    what an older Refrain could not set is as it was then."""
    new = copy.deepcopy(dict(settings))
    if "staleness_guard" in new:
        guard = new.pop("staleness_guard")
        new.setdefault("guards", [])
        if guard is not None:
            new["guards"].append(_guard_of(guard))
    data = new.get("data", {})
    if "shuffle" in data:
        shuffle = data.pop("shuffle")
        data.setdefault("order", "shuffled" if shuffle else "sequential")
    for group, values in BEFORE.items():
        if group in new:
            new[group] = {**values, **new[group]}
    return new


def _guard_of(guard: Mapping[str, Any]) -> dict[str, Any]:
    """The guard of overlapping steps, which was the only one, with a bound that has its side."""
    side = "below" if guard["metric"].endswith("effective_sample_size") else "above"
    rest = {name: guard[name] for name in ("metric", "action", "patience") if name in guard}
    return {"name": "staleness", "action": "synchronous", **rest, side: guard["bound"]}


class StageStore(ABC):
    """Where stage results lie."""

    __slots__ = ()

    store: Store

    @abstractmethod
    def step_key(self, step: int) -> str:
        """The folder of a step."""

    def stage_key(self, step: int, stage: str, shard: int | str, key: str) -> str:
        """The data of a stage's result. `key`: `digests.key_of` its inputs and parameters."""
        return f"{self.step_key(step)}/{stage}/{shard}-{key}{DATA_SUFFIX}"

    def finish(self, key: str, record: Mapping[str, object]) -> dict[str, object]:
        """Mark the stage result `key` as done, after its data: the record by which it is reused.

        As `finish_result`.
        """
        return finish_result(self.store, key, record)

    def expect(self, key: str) -> None:
        """A worker is about to make this result and to mark it as done (`finish_result`)."""
        del key  # every result is looked for here

    def discard(self, results: Mapping[str, Iterable[str]]) -> None:
        """Remove stage results that are needed no more: their markers, then their data.

        results: the key with which a result was finished -> the objects that its record names. They
        are others where a late attempt's bytes differed and so went to a key of their own.
        """
        self.store.delete([marker_key(key) for key in sorted(results)])
        self.store.delete(sorted({key for data in results.values() for key in data}))

    def finished(self, key: str) -> dict[str, object] | None:
        """The record with which the stage result `key` was finished; None when it was not."""
        try:
            return documents.read(self.store, marker_key(key), STAGE_FORMAT)
        except ObjectMissing:
            return None


def finish_result(store: Store, key: str, record: Mapping[str, object]) -> dict[str, object]:
    """Mark a stage result as done, after its data, wherever it was made.

    `key` is what `StageStore.stage_key` gave. The first record stands: the one that stands is
    returned, so a late attempt learns that another was faster and uses that one's result.
    """
    marker = marker_key(key)
    data = documents.encode(STAGE_FORMAT, record)
    if store.create(marker, data):
        return documents.decode(STAGE_FORMAT, marker, data)
    return documents.read(store, marker, STAGE_FORMAT)


def marker_key(key: str) -> str:
    """Where the marker of the stage result `key` is."""
    return key.removesuffix(DATA_SUFFIX) + ".json"


@dataclass(frozen=True, slots=True)
class RunStore(StageStore):
    """The store of one run. Small and picklable, as the store is."""

    store: Store
    run: str  # name of the run, the first part of all its keys
    role: str = "actor"  # of the trainer whose snapshots are meant

    def __post_init__(self) -> None:
        if not RUN_NAME.fullmatch(self.run):
            raise ValueError(
                f"Run name {self.run!r} does not fit a store; use letters, digits, '.', '_', '-'."
            )

    @property
    def run_json_key(self) -> str:
        return f"{self.run}/run.json"

    @property
    def head_key(self) -> str:
        return f"{self.run}/HEAD"

    @property
    def lease_key(self) -> str:
        return f"{self.run}/LEASE"

    def weights_key(self, version: int) -> str:
        """The folder of a policy version."""
        return f"{self.run}/weights/v{version:06d}"

    def step_key(self, step: int) -> str:
        """The folder of a step."""
        return f"{self.run}/steps/{step:06d}"

    def commit_key(self, step: int) -> str:
        return f"{self.step_key(step)}/commit.json"

    def lists_key(self, step: int, digest: str) -> str:
        """The long lists of a step's commit; `digest`: of their bytes, in hex."""
        return f"{self.step_key(step)}/{LISTS}{digest}.json"

    def is_record(self, key: str) -> bool:
        """Whether a key is a step's commit.json, or of the form of its lists: these always stay."""
        folder, _, name = key.rpartition("/")
        steps, _, number = folder.rpartition("/")
        if steps != f"{self.run}/steps" or not number.isascii() or not number.isdigit():
            return False
        return name == "commit.json" or name.startswith(LISTS)

    @property
    def state_folder(self) -> str:
        """The folder of the role's trainer snapshots."""
        return f"{self.run}/{'state' if self.role == 'actor' else self.role}"

    def state_key(self, step: int) -> str:
        """The folder of the trainer snapshot after a step."""
        return f"{self.state_folder}/{step:06d}"

    def versions(self) -> list[int]:
        """Policy versions that have a folder, finished or not, ascending."""
        names = self.store.children(f"{self.run}/weights")
        return sorted(int(name[1:]) for name in names if VERSION_FOLDER.fullmatch(name))

    def steps(self) -> list[int]:
        """Steps that have a folder, committed or not, ascending."""
        return _numbers(self.store.children(f"{self.run}/steps"))

    @property
    def questions_key(self) -> str:
        """Folder of what the run's own judges are asked at the moment."""
        return f"{self.run}/judged/asked"

    def state_steps(self) -> list[int]:
        """Steps that have a folder of the role's trainer snapshot, finished or not, ascending."""
        return _numbers(self.store.children(self.state_folder))

    def write_run(self, record: Mapping[str, object]) -> None:
        """Store run.json: the resolved settings, code version, seed."""
        self.store.write(self.run_json_key, documents.encode(RUN_FORMAT, record))

    def read_run(self) -> dict[str, object] | None:
        """What run.json says; None when the run is new."""
        try:
            data = self.store.read(self.run_json_key)
        except ObjectMissing:
            return None
        return documents.decode_version(RUN_READERS, self.run_json_key, data)

    def constant(self, name: str) -> object:
        """A field of run.json that never changes; None where there is none."""
        return (self.read_run() or {}).get(name)


@dataclass(frozen=True, slots=True)
class OwnRunStore(RunStore):
    """The store of the run that this process makes; a pickled one is a plain RunStore.

    What a stage of a step has finished before is listed once, when the first of its results is asked
    for: of a new step nothing, so that a thousand shards cost one request and not one each. What
    this process finishes, or expects of a worker, is looked for from then on. A result that somebody
    else finishes later is not seen, and made again; `finish` then says which of the two stands.

    Fields of run.json that never change are read once.
    """

    _listed: OrderedDict[str, set[str]] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)
    _constants: dict[str, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __reduce__(self) -> tuple[type[RunStore], tuple[Store, str, str]]:
        return RunStore, (self.store, self.run, self.role)

    def finish(self, key: str, record: Mapping[str, object]) -> dict[str, object]:
        self.expect(key)  # before it is written: the answer to a write may be lost
        return StageStore.finish(self, key, record)

    def expect(self, key: str) -> None:
        folder, name = _place(key)
        with self._lock:
            if folder in self._listed:
                self._listed[folder].add(name)

    def finished(self, key: str) -> dict[str, object] | None:
        folder, name = _place(key)
        with self._lock:
            if folder not in self._listed:
                self._listed[folder] = set(self.store.children(folder))
                while len(self._listed) > FOLDERS:
                    self._listed.popitem(last=False)
            if name not in self._listed[folder]:
                return None
        return StageStore.finished(self, key)

    def constant(self, name: str) -> object:
        if name not in self._constants:
            record = self.read_run()
            if record is None:  # it is still to be written
                return None
            self._constants[name] = record.get(name)
        return self._constants[name]


def _place(key: str) -> tuple[str, str]:
    """Folder and name of the marker of a stage result."""
    folder, _, name = marker_key(key).rpartition("/")
    return folder, name


def _from_version_1(record: dict[str, object]) -> dict[str, object]:
    """Version 1 had other settings and did not say which flow made the run."""
    settings = cast("dict[str, object]", record["config"])
    flow = "flows.ppo:ppo" if "critic" in settings else "flows.grpo:grpo"
    return {"flow": flow, **record, "config": upgraded_settings(settings)}


def _of_today(record: dict[str, object]) -> dict[str, object]:
    """Settings that have another name by now; a record without settings stays as it is."""
    if "config" not in record:
        return record
    return {**record, "config": renamed_settings(cast("dict[str, object]", record["config"]))}


RUN_READERS: dict[str, documents.Reader] = {
    RUN_FORMAT: _of_today,
    "refrain.run/1": _from_version_1,
}


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


class RollbackCause(StoredRecord):
    """Why a run began: a guard took another one back to an earlier step."""

    run: str  # that went back; the origin's, or one that had begun there
    after: int  # its step after which the guard decided so
    guard: str  # its name
    why: str  # as a sentence
    number: int = Field(ge=1)  # of rollbacks in a row, this one included
    change: list[str] = Field(default_factory=list)  # settings that changed, as key=value


class Origin(StoredRecord):
    """A place in another run of the same store, and what is taken over from it."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # the parent
    step: int  # its committed step with whose result the child begins
    at: int  # what the child counts that as: its own first step is at + 1
    commit_digest: str  # of the parent's commit.json of the step
    weights: WeightsRef  # the policy version that the step made
    trainer_state: bool  # optimizer and schedule go on too, not the weights alone
    cursor: bool  # the data go on where the step's draw ended, not from their beginning
    first_group: int = 0  # number of the first group of prompts that the child draws
    rollback: RollbackCause | None = None  # None: a person began the child

    @property
    def fork(self) -> bool:
        """Whether steps are counted on from the parent's: its history is the child's past."""
        return self.at == self.step

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


def origin_of(run: RunStore) -> Origin | None:
    """The run's origin; None when it began with its model's own weights. Raises ObjectDamaged."""
    record = run.constant(ORIGIN_FIELD)
    if record is None:
        return None
    return documents.validated(Origin, run.run_json_key, cast("Mapping[str, object]", record))


def start_of(run: RunStore) -> int:
    """The version that the run begins with; its first own step is the next number."""
    origin = origin_of(run)
    return 0 if origin is None else origin.at


def numbered(first: int, last: int) -> str:
    """Which steps or versions there are to name, as a sentence."""
    if last < first:
        return "There is none yet."
    return f"Name {first}, the only one." if first == last else f"Name one from {first} to {last}."


def parent_of(run: RunStore, origin: Origin) -> RunStore:
    """The run that an origin names."""
    return replace(run, run=origin.run)


def ancestry(run: RunStore) -> Iterator[tuple[RunStore, Origin | None]]:
    """The run, its parent, and so on, each with its own origin."""
    current: RunStore | None = run
    names: set[str] = set()
    while current is not None:
        if current.run in names:
            raise ObjectDamaged(f"Object {run.run_json_key} is, by way of others, its own origin.")
        names.add(current.run)
        origin = origin_of(current)
        yield current, origin
        current = None if origin is None else parent_of(current, origin)


def committer(run: RunStore, step: int) -> tuple[RunStore, int]:
    """The run in which a step of `run`'s past was committed, and its number there.

    A step after the origin is the run's own. Raises ValueError for one before every beginning.
    """
    for current, origin in ancestry(run):
        start = 0 if origin is None else origin.at
        if step > start:
            return current, step
        if origin is None:
            break
        step += origin.step - origin.at
    raise ValueError(f"Run {run.run} has no step {step}.")
