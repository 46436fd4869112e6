"""Beginning a run at a step of another one, and what the other one keeps for it.

`begin_at` makes the origin of a fork (the steps are counted on) or of a new run (they begin at 1);
`pin` tells the parent's retention what the child needs. Reading an origin back is in run_store.py.
"""

from __future__ import annotations

import time

from storage.objects.errors import ObjectMissing
from storage.runs import snapshots
from storage.runs.commit_log import head, read_commit, read_commit_digest
from storage.runs.retention import Pin, write_pin
from storage.runs.run_store import Origin, RunStore, committer, numbered, origin_of, parent_of
from storage.runs.weights import WeightsRef, open_chain


class NoSuchOrigin(ValueError):
    """A run cannot begin there; the message says why in one sentence."""


def begin_at(
    run: RunStore,
    step: int | None = None,
    *,
    fork: bool,
    trainer_state: bool = True,
    cursor: bool = True,
    first_group: int = 0,
) -> Origin:
    """The origin of a run that goes on from a committed step of `run` (None: its last).

    fork: count the steps on from there; otherwise the new run's first step is 1. trainer_state:
    take over optimizer and schedule, not the weights alone. cursor: go on in the data where the
    step's draw ended. Nothing is written. Raises NoSuchOrigin.
    """
    last = head(run)
    if last is None:
        raise NoSuchOrigin(f"Run {run.run} has no committed step, so nothing can begin from it.")
    target = last if step is None else step
    if not 1 <= target <= last:
        raise NoSuchOrigin(
            f"Run {run.run} has no committed step {target}: its last is {last}. {numbered(1, last)}"
        )
    owner, number = committer(run, target)
    origin = Origin(
        run=owner.run,
        step=number,
        at=target if fork else 0,
        commit_digest=read_commit_digest(owner, number),
        weights=read_commit(owner, number).version_out,
        trainer_state=trainer_state,
        cursor=cursor,
        first_group=first_group,
    )
    check(run, origin)
    return origin


def check(run: RunStore, origin: Origin) -> None:
    """Whether what the origin takes over is still in the store; NoSuchOrigin says what is not."""
    parent = parent_of(run, origin)
    try:
        if not origin.trainer_state:
            open_chain(run.store, origin.weights)
            return
        check_state(parent, origin.step)
    except ObjectMissing as error:
        what = "trainer state" if origin.trainer_state else "policy version"
        raise NoSuchOrigin(
            f"The {what} of {origin} is no longer in the store ({error}): retention removed it. "
            "Begin from a later step; store.keep_snapshots, store.keep_steps and "
            "store.keep_versions of a run say what it keeps."
        ) from error


def check_state(run: RunStore, version: int) -> None:
    """Whether the trainer's state of a version can be rebuilt. Raises ObjectMissing."""
    base = snapshots.base_of(run, version)
    for step in range((0 if base is None else base.version) + 1, version + 1):
        for key in read_commit(run, step).refs["batch"].objects:
            run.store.size(key)


def shared_weights(run: RunStore) -> WeightsRef | None:
    """The parent's policy version that a fork samples with first, if it is still there."""
    origin = origin_of(run)
    if origin is None or not origin.fork:
        return None
    return origin.weights if has_weights(run, origin) else None


def has_weights(run: RunStore, origin: Origin) -> bool:
    """Whether the parent's policy version is there; without it a fork makes its own of the state."""
    try:
        open_chain(run.store, origin.weights)
    except ObjectMissing:
        return False
    return True


def pin(child: RunStore, origin: Origin) -> None:
    """Have the parent's retention keep what the child shares, for as long as the child exists."""
    parent = parent_of(child, origin)
    base = snapshots.base_of(parent, origin.step)
    in_parent = base is not None and base.run == parent.run
    record = Pin(
        child=child.run,
        step=origin.step,
        snapshot=base.step if base is not None and in_parent else 0,
        weights=has_weights(child, origin),
        made_at=time.time(),
    )
    write_pin(parent, child.run, record)
