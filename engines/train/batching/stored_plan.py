"""The plan of an update as a stored object: made once by any worker, read by every rank.

A plan is a pure function of the batch (engines/train/batching/packing.py), so a rank that is handed
none, as in a replay, makes the same one. Of a large batch that takes seconds, which are better spent
once, by an engine without device, while no device waits. Without torch.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from engines.train.batching.mfu import CostModel
from engines.train.batching.packing import LoneRankPlans, MiniBatch, plan_update, read_lengths
from engines.workers.engine import Engine, StoreSpec
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """An update that is to be cut into micro-batches; arguments of `plan_update`."""

    batch: BatchRef  # [N], the columns that lengths are read of
    world: int  # of ranks that do not share micro-batches
    budget: int  # tokens of a micro-batch
    mini_batches: int
    cost: CostModel
    lone_rank: LoneRankPlans = "whole_groups"
    tree_training: bool = False  # what rows share counts once, for which their tokens are read


class Planner(Engine):
    """Makes plans of updates."""

    @abstractmethod
    def plan(self, request: PlanRequest, out_key: str) -> BatchRef:
        """Write the micro-batches of an update."""


class StoredPlanner(Planner):
    """Stores them."""

    def __init__(self, spec: StoreSpec) -> None:
        self._store = spec.open_store()

    def plan(self, request: PlanRequest, out_key: str) -> BatchRef:
        return write_plan(self._store, request, out_key)


def write_plan(store: Store, request: PlanRequest, out_key: str) -> BatchRef:
    """Make the plan of a batch and store it: a row for each micro-batch.

    Columns: `micro_rows`, the row numbers (jagged int32); `mini_batch` and `rank`, whose it is. Of a
    rank the micro-batches stand in their order. Errors are those of `plan_update`.
    """
    plan = plan_update(
        read_lengths(store, request.batch, request.tree_training, request.cost.patches),
        world=request.world,
        budget=request.budget,
        mini_batches=request.mini_batches,
        cost=request.cost,
        lone_rank=request.lone_rank,
    )
    owners, micros = [], []
    for number, mini in enumerate(plan):
        for rank, parts in enumerate(mini.ranks):
            owners += [(number, rank)] * len(parts)
            micros += list(parts)
    lengths = np.array([0, *map(len, micros)], np.int64)
    rows = np.fromiter(itertools.chain.from_iterable(micros), np.int32, int(lengths.sum()))
    owned = np.array(owners, np.int64).reshape(-1, 2)
    columns: dict[str, object] = {
        "micro_rows": Jagged(rows, lengths.cumsum()),
        "mini_batch": owned[:, 0].copy(),
        "rank": owned[:, 1].copy(),
    }
    return write_batch(store, out_key, columns)


def read_plan(store: Store, stored: BatchRef) -> tuple[MiniBatch, ...]:
    """The plan that `write_plan` stored."""
    values, offsets = stored.fetch_numpy(store, "micro_rows")
    assert offsets is not None
    flat = values.tolist()
    minis = stored.fetch_numpy(store, "mini_batch")[0].tolist()
    ranks = stored.fetch_numpy(store, "rank")[0].tolist()
    by_mini_batch: dict[int, dict[int, list[tuple[int, ...]]]] = {}
    for mini, rank, (start, stop) in zip(
        minis, ranks, itertools.pairwise(offsets.tolist()), strict=True
    ):
        by_mini_batch.setdefault(mini, {}).setdefault(rank, []).append(tuple(flat[start:stop]))
    return tuple(
        MiniBatch(ranks=tuple(tuple(micros) for _, micros in sorted(of_rank.items())))
        for _, of_rank in sorted(by_mini_batch.items())
    )
