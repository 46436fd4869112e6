"""One run's part of the store: its keys, its settings, and its stage results (stage_store.py).

<run>/run.json, <run>/HEAD, <run>/weights/v000012/, <run>/state/000010/, <run>/critic/000010/,
<run>/steps/000012/<stage>/<shard>-<key>.safetensors and .json, <run>/steps/000012/commit.json and,
where that would be long, lists-<digest>.json
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import cast

from configs.stored import renamed_settings, upgraded_settings
from storage.objects import documents
from storage.objects.errors import ObjectMissing
from storage.objects.store import Store
from storage.runs.stage_store import StageStore, marker_key

RUN_FORMAT = "refrain.run/2"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
VERSION_FOLDER = re.compile(r"v[0-9]+")
TRAINED_ROLES = ("actor", "critic")  # whose trainers have snapshots
FOLDERS = 64  # of steps and stages whose listings are kept
LISTS = "lists-"  # how the name of an object with the lists of a commit begins


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
