"""The step of a sample or a row is computed, and is the one that reading every batch finds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from storage.audit.lineage import RemovedSample, of_prompt, of_sample, of_version
from storage.audit.samples import SampleOrigin
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.prompts.cursor import Cursor, draw
from storage.runs.commit_log import Commit, Ledger, commit
from storage.runs.forks import begin_at
from storage.runs.retention import sweep
from storage.runs.run_store import Origin, RunStore
from storage.runs.weights import WeightsRef
from tests.storage.audit import small_run


class Rows:
    """A data set of so many rows."""

    digest = "rows"

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


@dataclass
class Simulated:
    """A run of which it is written down where each sample and row went."""

    run: RunStore
    rows: Rows
    group_size: int
    start: int = 0
    first_group: int = 0
    over: int = 3  # groups under way besides the two that train
    recorded: bool = True  # whether commits have the numbers of groups, as they do since version 2
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    trained: dict[int, tuple[str, int]] = field(default_factory=dict)  # sample -> run, step
    left: set[int] = field(default_factory=set)  # samples of groups that were dropped
    drawn: dict[int, list[tuple[str, int]]] = field(default_factory=dict)  # row -> run, step
    carried: list[tuple[int, int]] = field(default_factory=list)  # group, row
    cursor: Cursor | None = None

    def begin(self, origin: Origin | None = None) -> Simulated:
        small_run.begin(self.run, origin)
        return self

    def step(self, step: int) -> None:
        cursor = self.cursor or Cursor(
            epoch=0, position=0, seed=7, order="shuffled", size=self.rows.size, digest="rows"
        )
        at_once = 2 + self.over
        numbers, cursor = draw(self.rows, cursor, at_once - len(self.carried))
        first = self.first_group + (step - 1 - self.start) * at_once
        new = [(first + n, row) for n, row in enumerate(numbers)]
        for _, row in new:
            self.drawn.setdefault(row, []).append((self.run.run, step))
        under_way = [*self.carried, *new]
        self.chance.shuffle(under_way)
        members, rest = sorted(under_way[:2]), sorted(under_way[2:])
        carried = [one for one in rest if self.chance.random() < 0.7]
        dropped = [one for one in rest if one not in carried]
        for group, _ in members:
            self.trained |= dict.fromkeys(self._samples(group), (self.run.run, step))
        self.left |= {one for group, _ in dropped for one in self._samples(group)}
        refs = {"prompts": self._batch(step, "prompts", new, 1)}
        refs["samples"] = refs["batch"] = self._batch(step, "samples", members)
        if carried:
            refs["carried"] = self._batch(step, "carried", carried, 1)
        if dropped:
            refs["left_out"] = self._batch(step, "left", dropped)
        self._commit(step, cursor, refs, first)
        self.cursor, self.carried = cursor, carried

    def _samples(self, group: int) -> range:
        return range(group * self.group_size, (group + 1) * self.group_size)

    def _batch(
        self, step: int, name: str, groups: list[tuple[int, int]], each: int | None = None
    ) -> BatchRef:
        each = each or self.group_size
        ids = np.repeat([group for group, _ in groups], each).astype(np.int64)
        rows = len(ids)
        columns: dict[str, Any] = {
            "group_id": ids,
            "prompt_row": np.repeat([row for _, row in groups], each).astype(np.int64),
        }
        if name == "prompts":
            columns["row"] = [{"question": row} for _, row in groups]
        else:
            columns |= {
                "sample_id": ids * each + np.arange(rows) % each,
                "response_ids": [np.arange(2)] * rows,
                "weight_spans": [np.array([step - 1, 0, 2])] * rows,
                "status": np.zeros(rows, np.int64),
                "finish_reason": ["stop"] * rows,
                "weights_digest": ["xxh3:0"] * rows,
                "worker": ["rollout-0"] * rows,
                "attempt": np.ones(rows, np.int64),
                "reward": np.ones(rows, np.float32),
                "reward_code": ["c0de"] * rows,
                "advantages": [np.ones(2, np.float32)] * rows,
            }
        return write_batch(self.run.store, self.run.stage_key(step, name, 1, "k"), columns)

    def _commit(self, step: int, cursor: Cursor, refs: dict[str, BatchRef], first: int) -> None:
        versions = [
            WeightsRef(version=n, key=self.run.weights_key(n), digest=f"xxh3:{n}", nbytes=1)
            for n in (step - 1, step)
        ]
        numbers = {"first_group": first, "group_size": self.group_size} if self.recorded else {}
        commit(
            self.run,
            Commit.model_validate(
                {
                    "step": step,
                    "parent": step - 1,
                    "refs": refs,
                    "version_in": versions[0],
                    "version_out": versions[1],
                    "cursor": cursor.to_json(),
                    "ledger": Ledger(),
                    **numbers,
                }
            ),
        )


def simulated(run: RunStore, steps: int, **fields: Any) -> Simulated:
    made = Simulated(run=run, rows=Rows(37), group_size=3, **fields).begin()
    for step in range(1, steps + 1):
        made.step(step)
    return made


def forked(made: Simulated, at: int, to: int, group_size: int = 3) -> Simulated:
    """A fork that goes on with what the parent had begun; numbers as tasks/run/beginning.py has them."""
    groups = made.first_group + (at - made.start) * (2 + made.over)
    first = max(groups, -(-groups * made.group_size // group_size))
    run = RunStore(made.run.store, f"{made.run.run}-child")
    origin = begin_at(made.run, at, fork=True, first_group=first)
    child = Simulated(
        run=run,
        rows=made.rows,
        group_size=group_size,
        start=at,
        first_group=first,
        over=made.over,
        recorded=made.recorded,
        chance=random.Random(1),
        trained=dict(made.trained),
        left=set(made.left),
        drawn={row: list(steps) for row, steps in made.drawn.items()},
        carried=list(made.carried),
        cursor=made.cursor,
    ).begin(origin)
    for step in range(at + 1, to + 1):
        child.step(step)
    return child


def found(run: RunStore, sample: int) -> tuple[str, int] | str:
    try:
        origin, _ = of_sample(run, sample)
    except ValueError as error:
        return str(error)
    assert isinstance(origin, SampleOrigin)
    assert origin.sample == sample
    return origin.run, origin.step


@pytest.mark.parametrize("recorded", [True, False])
def test_every_sample_is_found_where_it_trained(run: RunStore, recorded: bool) -> None:
    made = simulated(run, 23, recorded=recorded)
    assert {sample: found(run, sample) for sample in made.trained} == made.trained
    assert all("trained nothing" in found(run, sample) for sample in made.left)
    under_way = {one for group, _ in made.carried for one in made._samples(group)}
    assert all("trained nothing" in found(run, sample) for sample in under_way)
    assert "has sample 999" in found(run, 999)


@pytest.mark.parametrize("group_size", [3, 2, 5])
def test_a_forks_samples_are_found_across_the_border(store: Store, group_size: int) -> None:
    parent = simulated(RunStore(store, "run"), 9)
    begun = {one for group, _ in parent.carried for one in parent._samples(group)}
    child = forked(parent, 9, 17, group_size)
    assert begun or parent.carried == []
    for step in range(10, 13):  # what the parent did after the fork is not the child's past
        parent.step(step)
    mine = {one: where for one, where in child.trained.items() if one not in child.left}
    assert {sample: found(child.run, sample) for sample in mine} == mine


def test_every_draw_of_a_row_is_found(store: Store) -> None:
    parent = simulated(RunStore(store, "run"), 20)
    child = forked(parent, 20, 31)
    assert max(map(len, child.drawn.values())) >= 3  # epochs
    for row, draws in child.drawn.items():
        origin = of_prompt(child.run, row, limit=1000)
        groups = {one.group for one in origin.samples}
        assert len(groups) + len(origin.dropped) == len(draws) and not origin.more
        expected = {one for one, _ in child.trained.items()}
        assert {one.sample for one in origin.samples} <= expected
        assert {one.prompt_row for one in origin.samples} <= {row}
    short = of_prompt(child.run, row, limit=1)
    assert len(short.samples) + len(short.dropped) <= 1 + 3 and short.more


def test_the_cost_grows_with_the_logarithm_of_the_steps(run: RunStore) -> None:
    made = simulated(run, 16, over=0)
    costs = []
    for steps in (16, 128):
        for step in range(16 + 1, steps + 1):
            made.step(step)
        before = COUNTER.total()
        assert found(run, 20) == made.trained[20]
        costs.append((COUNTER.total() - before).requests)
    assert costs[1] - costs[0] <= 5  # log2(128 / 16) = 3 halvings more
    before = COUNTER.total()
    assert len(of_version(run, 128, limit=4).steps) == 4
    assert (COUNTER.total() - before).requests < 60


def test_a_sample_of_a_removed_step_is_told_what_the_commit_knows(run: RunStore) -> None:
    made = simulated(run, 12, over=0)
    small_run.snapshot(run, 10)
    sweep(run, keep_versions=1, keep_steps=1, keep_snapshots=1)
    origin, outline = of_sample(run, 7)
    assert (origin, outline.version_out.digest) == (
        RemovedSample(run="run", step=made.trained[7][1], sample=7, group=2),
        f"xxh3:{made.trained[7][1]}",
    )
    (row,) = [row for row, draws in made.drawn.items() if draws[0] == ("run", 1)][:1]
    assert of_prompt(run, row).removed == [("run", 1)]
