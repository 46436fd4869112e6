"""How much of a store a run takes, by what it is for, and how much its newest steps add."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from configs.storage import StoreConfig
from storage.runs.run_store import RunStore

RECENT = 10  # committed steps by which growth is told


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """Bytes of a run's objects, and how many things they belong to."""

    total: int
    weights: int  # of policy versions
    versions: int  # how many
    state: int  # of snapshots of trainers, a critic's too
    snapshots: int  # how many
    batches: int  # of steps: prompts, samples, rewards, what trained
    steps: int  # of which batches are there
    records: int  # commits and their lists, which always stay
    others: int  # evaluations, curves, notes
    batches_per_step: int  # median of the newest steps; 0 where none is there
    records_per_step: int  # likewise
    largest_version: int  # bytes of the largest policy version
    largest_snapshot: int  # bytes of the largest snapshot, of all trained roles

    def at_end(self, keep: StoreConfig, head: int, steps: int) -> int:
        """Bytes after the last one of so many steps, `head` of them committed, as the settings keep.

        An estimate: by the newest steps, the largest version and the largest snapshot. It leaves out
        versions with an alias beyond the newest, and what children of the run need.
        """
        remaining = max(0, steps - head)
        batches = min(remaining, max(0, (keep.keep_steps or steps) - self.steps))
        registered = steps // keep.snapshot_every
        if keep.keep_registered is not None:
            registered = min(registered, keep.keep_registered)
        versions = 1 + min(keep.keep_versions, steps) + registered
        snapshots = min(keep.keep_snapshots, steps // keep.snapshot_every)
        return (
            max(self.weights, versions * self.largest_version)
            + max(self.state, snapshots * self.largest_snapshot)
            + self.batches
            + batches * self.batches_per_step
            + self.records
            + remaining * self.records_per_step
            + self.others
        )


def size_of(run: RunStore, head: int) -> RunSize:
    """The size of a run whose last committed step is `head`; this lists all of it."""
    weights, state = Counter[str](), Counter[str]()
    batches, records = Counter[int](), Counter[int]()
    others = 0
    for key, nbytes in run.store.sizes_below(run.run).items():
        parts = key.split("/")
        kind, name = parts[1], parts[2] if len(parts) > 3 else ""
        if kind == "weights" and name:
            weights[name] += nbytes
        elif kind in ("state", "critic") and name:
            state[f"{kind}/{name}"] += nbytes
        elif kind == "steps" and name.isdecimal():
            (records if run.is_record(key) else batches)[int(name)] += nbytes
        else:
            others += nbytes
    recent = [step for step in sorted(batches) if step <= head][-RECENT:] or [head]
    by_step = Counter[str]()  # of all roles
    for name, nbytes in state.items():
        by_step[name.partition("/")[2]] += nbytes
    return RunSize(
        total=weights.total() + state.total() + batches.total() + records.total() + others,
        weights=weights.total(),
        versions=len(weights),
        state=state.total(),
        snapshots=len(by_step),
        batches=batches.total(),
        steps=len(batches),
        records=records.total(),
        others=others,
        batches_per_step=round(statistics.median(batches[step] for step in recent)),
        records_per_step=round(statistics.median(records[step] for step in recent)),
        largest_version=max(weights.values(), default=0),
        largest_snapshot=max(by_step.values(), default=0),
    )
