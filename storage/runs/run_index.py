"""What a run's store holds, kept so that nobody lists the store or reads every commit for it.

`index.json` is a note, never the truth: it names the commit that it goes up to by digest. Where the
chain of commits does not bear that out, or there is no index, it is made anew from commits and
listings. Only who holds the run's lease writes it. Retention (retention.py) and the clearing of what
dead attempts left (orphans.py) go by it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from storage.objects import documents
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.runs.commit_log import Commit, read_commit, read_commit_digest
from storage.runs.run_store import DATA_SUFFIX, TRAINED_ROLES, RunStore
from storage.runs.snapshots import MARKER
from storage.runs.weights import open_manifest_at

log = logging.getLogger(__name__)

FORMAT = "refrain.index/1"


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
    try:
        body = documents.read(run.store, index_key(run), FORMAT)
        found = documents.validated(RunIndex, index_key(run), body)
        if found.step > head or (found.step == head and not _holds(run, found)):
            raise ObjectDamaged(f"Object {index_key(run)} is not of this run's commits.")
        for step in range(found.step + 1, head + 1):
            commit = read_commit(run, step)
            if step == found.step + 1 and commit.parent_digest != found.commit_digest:
                raise ObjectDamaged(f"Object {index_key(run)} is not of this run's commits.")
            _add(run, found, commit)
        if found.step < head:
            found.step, found.commit_digest = head, read_commit_digest(run, head)
        else:
            _add_snapshots(run, found, head)  # one may be stored after its step is committed
    except ObjectMissing:
        return None
    except ObjectDamaged as error:
        log.warning("%s It is made anew.", error)
        return None
    return found


def _holds(run: RunStore, index: RunIndex) -> bool:
    return read_commit_digest(run, index.step) == index.commit_digest


def write_index(run: RunStore, index: RunIndex) -> None:
    """Put the index in place of an earlier one. Only under the run's lease."""
    data = documents.encode(FORMAT, index.model_dump(mode="json"), indent=None)
    run.store.write(index_key(run), data)


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
        there = [step for step in steps if _marked(trained, step)]
        index.snapshots[role] = there
        index.unfinished[role] = [step for step in steps if step not in there]
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
    if others := borrowed_objects(run, commit):
        index.borrowed[commit.step] = others
    if commit.step not in index.suspects and (_failed(commit) or unnamed_objects(run, commit)):
        index.suspects.append(commit.step)


def _add_snapshots(run: RunStore, index: RunIndex, step: int) -> None:
    """The snapshots of a step and of the one before; a critic's is written before the policy's."""
    for at in (step - 1, step):
        if at in index.snapshots.get("actor", []) or not _marked(replace(run, role="actor"), at):
            continue
        for role in TRAINED_ROLES:
            known = index.snapshots.setdefault(role, [])
            if at not in known and (role == "actor" or _marked(replace(run, role=role), at)):
                index.snapshots[role] = sorted([*known, at])
            unfinished = index.unfinished.get(role, [])
            index.unfinished[role] = [one for one in unfinished if one != at]


def _marked(trained: RunStore, step: int) -> bool:
    return trained.store.exists(f"{trained.state_key(step)}/{MARKER}")


def borrowed_objects(run: RunStore, commit: Commit) -> list[str]:
    """Batch objects that a commit names and that lie with other steps, as a carried group's do."""
    own = f"{run.step_key(commit.step)}/"
    return sorted(key for key in commit.objects if not key.startswith(own))


def unnamed_objects(run: RunStore, commit: Commit) -> list[str]:
    """What lies with a committed step and is named by its commit nowhere: batches and lists."""
    named = commit.objects | {"" if commit.lists is None else commit.lists.key}
    return [
        key
        for key in run.store.list(run.step_key(commit.step))
        if key not in named and (key.endswith(DATA_SUFFIX) or _is_lists(run, key))
    ]


def _is_lists(run: RunStore, key: str) -> bool:
    return run.is_record(key) and not key.endswith("/commit.json")


def _failed(commit: Commit) -> bool:
    """Whether some attempt of the step failed, which may have left something."""
    return any(one.get("error") or one.get("number") not in (None, 1) for one in commit.attempts)


def index_key(run: RunStore) -> str:
    return f"{run.run}/index.json"
