"""The counts of a commit, recounted from the batches that it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from storage.batches.columns import TASK
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit, Ledger, read_outline
from storage.runs.opponents import opponent_of
from storage.runs.run_store import committer, start_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from storage.batches.refs import BatchRef
    from storage.objects.store import Store
    from storage.runs.run_store import RunStore


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
    drawn = after.drawn - before.drawn
    moved = _place(commit.cursor) - _place(cursor or {})
    passed = after.quarantined - before.quarantined
    if commit.cursor and moved != drawn + passed:
        over = f" and {passed} passed over" if passed else ""
        raise ValueError(
            f"Step {commit.step} counts {drawn} prompts drawn{over}, but its data cursor moved by "
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
        _recount(store, commit, before, drawn)
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


def _recount(store: Store, commit: Commit, before: Ledger, drawn: int) -> None:
    prompts = len(commit.refs["prompts"])
    trained = len(np.unique(commit.refs["batch"].fetch_numpy(store, "group_id")[0]))
    counted = commit.ledger.trained - before.trained
    if trained != counted:
        raise ValueError(
            f"Step {commit.step} counts {counted} prompts trained, but its batch holds the samples "
            f"of {trained}."
        )
    unusable = sum(map(len, commit.dropped_rows.values()))
    known = "dropped_rows" in commit.model_fields_set  # earlier commits did not name them
    if prompts > drawn or (known and prompts + unusable != drawn):
        raise ValueError(
            f"Step {commit.step} counts {drawn} prompts drawn, but stored {prompts} and named "
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
    known = np.concatenate([members, on])
    if len(np.unique(known)) != len(known) or not np.isin(known, had).all():
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
    left = sum(
        commit.ledger.dropped.get(reason, 0) - before.dropped.get(reason, 0) for reason in reasons
    )
    if len(had) != len(known) + left:
        raise ValueError(
            f"Step {commit.step} had {len(had)} groups, of which {len(members)} are in its batch, "
            f"{left} dropped and {len(on)} handed on."
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
    for version, digest in _held(run.store, samples):
        if version not in digests:
            digests[version] = _digest_of(run, version)
        expected = digests[version]
        if expected is not None and digest != expected:
            raise ValueError(
                f"Samples of step {commit.step} name policy version {version}, whose digest is "
                f"{expected}, but their engine held {digest}."
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
