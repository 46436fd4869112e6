"""Which rows go to which rank, mini-batch and micro-batch: plans made from lengths alone.

A plan is a pure function of row lengths, so every rank makes the same one without talking and before
any token is read; with tree training also of what rows begin with alike, for which tokens are read.
Without torch. What a micro-batch looks like as tensors is in micro_batch.py, how costs are balanced
in balancing.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from engines.train.batching.balancing import contiguous_cuts, first_fit, largest_first, partition
from engines.train.batching.mfu import CostModel
from engines.train.batching.tree_training import Beginnings, read_beginnings
from storage.batches.columns import Author
from storage.batches.forest import read_forests
from storage.batches.refs import BatchRef
from storage.objects.store import Store

# Rows of a mini-batch beyond which its plan is made by largest-first alone. The search that smaller
# ones get takes time with the square of the rows: minutes at 16,000.
LARGE = 8192
LARGE_UNIT = 4  # units of a large plan fill at most this part of a micro-batch
# With tree training rows of a micro-batch have, each counted whole, at most so many times the tokens
# of its budget: attention works on each row whole, so memory must not grow with what they share.
WHOLE = 8

# How one rank's rows come into micro-batches, which run one after the other there. balanced: as on
# several ranks, groups are cut so that micro-batches cost alike, and each piece computes its prompt
# anew; whole_groups: they are cut only where they do not fit. A run keeps the one that it began with.
LoneRankPlans = Literal["balanced", "whole_groups"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """What a plan knows of a batch: one entry per row."""

    prompts: Ints  # [N] prompt tokens
    responses: Ints  # [N] response tokens
    groups: Ints | None = None  # [N] rows of one group share their prompt; None: rows share nothing
    beginnings: Beginnings | None = None  # of the rows of each group; None: no tree training
    # [N] sum of the squared lengths of each row's sequences, where it is several. None: it is one.
    squares: Ints | None = None
    # [N] sum of those lengths, where sequences are paths that share tokens (forest.py). None beside
    # squares: they share none (image_turns.py), `prompts` is all that is read besides the responses.
    slots: Ints | None = None

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.responses):
            raise ValueError(
                f"{len(self.prompts)} prompts but {len(self.responses)} responses: not one batch."
            )
        if self.groups is not None and len(self.groups) != len(self.prompts):
            raise ValueError(f"{len(self.groups)} group ids for {len(self.prompts)} rows.")

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def apart(self) -> bool:
        """Whether rows share no prompt."""
        return self.squares is not None and self.slots is None

    def slots_of(self, rows: list[int]) -> Ints:
        """[n] tokens of each row's sequences, were nothing shared."""
        if self.slots is not None:
            return self.slots[rows]
        return self.prompts[rows] + self.responses[rows] - 1

    def squares_of(self, rows: list[int]) -> Ints:
        """[n] sum of the squared lengths of each row's sequences."""
        return self.slots_of(rows) ** 2 if self.squares is None else self.squares[rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """The rows of one optimizer step: `ranks[rank][micro_batch]` are row numbers, ascending.

    Example: five rows for two ranks, two micro-batches each, of which the last is empty
        MiniBatch(ranks=(((0, 3), (1,)), ((2, 4), ())))
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]  # every rank has as many micro-batches

    def rows(self) -> list[int]:
        """All rows of the mini-batch, ascending."""
        return sorted(row for rank in self.ranks for micro in rank for row in micro)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows that stay together; rows of one unit share their prompt."""

    rows: tuple[int, ...]
    tokens: int  # as the budget counts them
    cost: float


def read_lengths(
    store: Store, batch: BatchRef, tree_training: bool = False, patches: int = 0
) -> Lengths:
    """The lengths and groups of a batch's rows; reads row indices and group numbers only.

    With `tree_training` also what the rows of a group begin with alike; that reads all tokens.
    patches: tokens that an image becomes, where the policy looks at one before each turn; then the
    tokens' authors are read too.
    """
    groups = None
    if "group_id" in batch.names:
        groups = batch.own_groups(store)
    if patches:
        return _turn_lengths(store, batch, groups, patches)
    lengths = Lengths(
        prompts=batch.lengths(store, "prompt_ids"),
        responses=batch.lengths(store, "response_ids"),
        groups=groups,
        beginnings=read_beginnings(store, batch, groups) if tree_training else None,
    )
    forests = read_forests(store, batch)
    if forests is None or all(forest.one_path for forest in forests):
        return lengths
    read = [forest.path_lengths() - 1 for forest in forests]  # the last token is only a label
    return replace(
        lengths,
        slots=np.array([int(own.sum()) for own in read], np.int64),
        squares=np.array([int((own**2).sum()) for own in read], np.int64),
    )


def _turn_lengths(store: Store, batch: BatchRef, groups: Ints | None, patches: int) -> Lengths:
    """Of rows whose turns are sequences of their own, each with the prompt and an image."""
    authors, offsets = batch.fetch_numpy(store, "author")
    assert offsets is not None
    before = np.concatenate([[0], np.cumsum(authors == Author.POLICY)])
    written = np.diff(before[offsets]).astype(np.int64)
    turns = batch.lengths(store, "frame")
    read = batch.lengths(store, "prompt_ids") + patches
    each = read + written / np.maximum(turns, 1) - 1
    return Lengths(
        # So that prompt and response without its last token are all that is read.
        prompts=np.where(turns > 0, turns * (read - 1) + 1, read),
        responses=written,
        groups=groups,
        squares=np.ceil(turns * each**2).astype(np.int64),
    )


def read_mask_counts(store: Store, batch: BatchRef, rows: Sequence[int]) -> tuple[int, int, int]:
    """Tokens with mask 1, rows with at least one such token, and rows, among the given rows.

    What the normaliser of a loss is made of; reads response_mask only, where there is one.
    """
    if not rows:
        return 0, 0, 0
    selected = batch.take(rows)
    if "response_mask" not in batch.names:
        lengths = selected.lengths(store, "response_ids")
        return int(lengths.sum()), int((lengths > 0).sum()), len(rows)
    values, offsets = selected.fetch_numpy(store, "response_mask")
    assert offsets is not None
    before = np.concatenate([[0], np.cumsum(values.astype(bool))])
    counts = np.diff(before[offsets])
    return int(counts.sum()), int((counts > 0).sum()), len(rows)


def plan_update(
    lengths: Lengths,
    *,
    world: int,
    budget: int,
    mini_batches: int = 1,
    cost: CostModel | None = None,
    lone_rank: LoneRankPlans = "whole_groups",
) -> tuple[MiniBatch, ...]:
    """The optimizer steps of one pass over a batch.

    Mini-batches follow the order of rows and keep groups whole where there are enough groups; they
    do not depend on `world` or `budget`.

    Args:
        lengths: Of N rows.
        world: Number of ranks.
        budget: Most tokens of a micro-batch, a shared prompt (with tree training all that rows of a
            group begin with alike) counted once.
        mini_batches: Optimizer steps; a batch with fewer rows has as many as rows.
        cost: By which micro-batches are balanced; None: by their tokens.
        lone_rank: How rows are cut where `world` is 1.

    Raises:
        ValueError: A row is longer than the budget.
    """
    _check_budget(lengths, budget)
    mini_batches = min(mini_batches, len(lengths))
    groups = _groups(lengths, range(len(lengths)))
    if len(groups) < mini_batches:
        groups = [[row] for row in range(len(lengths))]
    whole = world == 1 and lone_rank == "whole_groups"
    plan_step = _plan_lone_step if whole else partial(_plan_step, world=world)
    pieces = np.array_split(np.arange(len(groups)), mini_batches)
    return tuple(
        plan_step(
            lengths,
            sorted(row for g in piece for row in groups[g]),
            budget=budget,
            cost=cost or CostModel(),
        )
        for piece in pieces
    )


def plan_logprobs(
    lengths: Lengths,
    *,
    world: int,
    budget: int,
    cost: CostModel | None = None,
    lone_rank: LoneRankPlans = "whole_groups",
) -> MiniBatch:
    """Forward passes over a batch; rank r holds the r-th contiguous range of rows.

    So the ranks' results, concatenated in rank order, are in the order of the batch. Arguments and
    errors are those of `plan_update`.
    """
    _check_budget(lengths, budget)
    cost = cost or CostModel()
    if world == 1 and lone_rank == "whole_groups":
        return _plan_lone_step(lengths, range(len(lengths)), budget=budget, cost=cost)
    edges = contiguous_cuts(_row_costs(lengths, cost), world)
    per_rank = [range(a, b) for a, b in pairwise(edges)]
    if max(map(len, per_rank)) > LARGE:
        bins = [
            _large_micro_batches(lengths, rows, 1, budget, cost) if rows else []
            for rows in per_rank
        ]
        most = max(map(len, bins))
        return MiniBatch(
            ranks=tuple(
                (*(unit.rows for unit in units), *[()] * (most - len(units))) for units in bins
            )
        )
    totals = [_unit(lengths, rows, cost).tokens if rows else 0 for rows in per_rank]
    count = max(1, -(-max(totals) // budget))
    while True:
        ranks = [_micro_batches(lengths, rows, count, budget, cost) for rows in per_rank]
        if all(micros is not None for micros in ranks):
            return MiniBatch(
                ranks=tuple(tuple(unit.rows for unit in micros) for micros in ranks if micros)
            )
        count += 1


def _plan_step(
    lengths: Lengths, rows: Sequence[int], *, world: int, budget: int, cost: CostModel
) -> MiniBatch:
    """Balance rows over world x count micro-batches, the fewest that respect the budget."""
    if len(rows) > LARGE:
        bins = _large_micro_batches(lengths, rows, world, budget, cost)
    else:
        total = sum(_unit(lengths, group, cost).tokens for group in _groups(lengths, rows))
        count = max(1, -(-total // (world * budget)))
        while (balanced := _micro_batches(lengths, rows, world * count, budget, cost)) is None:
            count += 1
        bins = balanced
    bins.sort(key=lambda unit: (-unit.cost, unit.rows))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(world)]
    for first in range(0, len(bins), world):  # neighbours in cost run at the same time
        turn = bins[first : first + world]
        for rank, unit in enumerate(turn if first // world % 2 == 0 else reversed(turn)):
            ranks[rank].append(unit.rows)
    return MiniBatch(ranks=tuple(tuple(micros) for micros in ranks))


def _plan_lone_step(
    lengths: Lengths, rows: Sequence[int], *, budget: int, cost: CostModel
) -> MiniBatch:
    """One rank's micro-batches, of whole groups where these fit: none is cut for balance."""
    groups = _groups(lengths, rows)
    units = [unit for group in groups for unit in _cut_to_fit(lengths, group, budget, cost)]
    parts = first_fit([unit.tokens for unit in units], budget)
    bins = [
        _unit(lengths, sorted(row for i in part for row in units[i].rows), cost) for part in parts
    ]
    if len(rows) <= LARGE:  # as many, and none larger than it must be
        even = _fill_bins(lengths, units, len(parts), cost)
        bins = even if max(unit.tokens for unit in even) <= budget else bins
    bins.sort(key=lambda unit: (-unit.cost, unit.rows))
    return MiniBatch(ranks=(tuple(unit.rows for unit in bins),))


def _cut_to_fit(
    lengths: Lengths, group: list[int], budget: int, cost: CostModel
) -> Iterator[_Unit]:
    """A group; of one that is larger than the budget its rows in turn, in as few pieces as can be."""
    while group:
        tokens = partial(_first_tokens, lengths, group)
        fit = max(1, bisect_right(range(1, len(group) + 1), budget, key=tokens))
        yield _unit(lengths, group[:fit], cost)
        group = group[fit:]


def _first_tokens(lengths: Lengths, group: list[int], number: int) -> int:
    """Of so many rows of a group, as the budget counts them."""
    return _unit(lengths, group[:number], CostModel()).tokens


def _large_micro_batches(
    lengths: Lengths, rows: Sequence[int], world: int, budget: int, cost: CostModel
) -> list[_Unit]:
    """World x count micro-batches of very many rows within the budget, in time that grows with rows.

    Of 16,000 rows of 1,000 to 3,000 tokens, in micro-batches of 16,384, it makes a tenth more than
    the tokens need; the search for fewer rows makes a twentieth more.
    """
    units = _cut(lengths, _groups(lengths, rows), 1, max(1, budget // LARGE_UNIT), cost)
    count = max(1, -(-sum(unit.tokens for unit in units) // (world * budget)))
    while True:
        parts = largest_first([unit.cost for unit in units], min(world * count, len(units)))
        if max(sum(units[i].tokens for i in part) for part in parts) <= budget:
            break
        count += max(1, count // 100)
    bins = [
        _unit(lengths, sorted(row for i in part for row in units[i].rows), cost) for part in parts
    ]
    return bins + [_Unit((), 0, 0.0)] * (world * count - len(bins))


def _micro_batches(
    lengths: Lengths, rows: Sequence[int], count: int, budget: int, cost: CostModel
) -> list[_Unit] | None:
    """`count` balanced micro-batches of rows, or None when one would exceed the budget.

    Keeping a group together saves the work on its prompt but is coarse: groups are cut into ever more
    pieces as long as that makes the largest micro-batch cheaper.
    """
    groups = _groups(lengths, rows)
    best: list[_Unit] | None = None
    pieces = 1
    while True:
        units = _cut(lengths, groups, pieces, budget, cost)
        bins = _fill_bins(lengths, units, count, cost)
        if max(unit.tokens for unit in bins) <= budget and (
            best is None or max(u.cost for u in bins) < 0.999 * max(u.cost for u in best)
        ):
            best = bins
        if all(len(unit.rows) == 1 for unit in units):
            return best
        pieces *= 2


def _cut(
    lengths: Lengths, groups: list[list[int]], pieces: int, budget: int, cost: CostModel
) -> list[_Unit]:
    """Cut each group into `pieces` units, or more where a unit would exceed the budget."""
    units: list[_Unit] = []
    for group in groups:
        number = min(pieces, len(group))
        while True:
            cut = [_unit(lengths, part, cost) for part in np.array_split(group, number)]
            if number == len(group) or max(unit.tokens for unit in cut) <= budget:
                break
            number += 1
        units += cut
    return units


def _fill_bins(lengths: Lengths, units: list[_Unit], count: int, cost: CostModel) -> list[_Unit]:
    if len(units) <= count:
        return units + [_Unit((), 0, 0.0)] * (count - len(units))
    return [
        _unit(lengths, sorted(row for i in part for row in units[i].rows), cost)
        for part in partition([unit.cost for unit in units], count)
    ]


def _groups(lengths: Lengths, rows: Sequence[int]) -> list[list[int]]:
    """Rows by group, in the order of their first row; with tree training, neighbours share most."""
    if lengths.groups is None:
        return [[row] for row in rows]
    by_key: dict[tuple[int, int], list[int]] = {}
    tree = lengths.beginnings
    alone = tree is not None or lengths.apart
    for row in rows:
        key = (int(lengths.groups[row]), 0 if alone else int(lengths.prompts[row]))
        by_key.setdefault(key, []).append(row)
    groups = list(by_key.values())
    if tree is not None:
        for group in groups:
            group.sort(key=tree.places.__getitem__)
    return groups


def _unit(lengths: Lengths, rows: Sequence[int] | Ints, cost: CostModel) -> _Unit:
    """Tokens and cost of rows that are packed together, where a prompt is computed once per group."""
    if lengths.beginnings is not None:
        return _tree_unit(lengths, lengths.beginnings, rows, cost)
    tokens = logits = squares = 0
    prompts: set[tuple[int, int]] = set()
    for row in rows:
        prompt, response = int(lengths.prompts[row]), int(lengths.responses[row])
        if response == 0:
            continue
        group = int(row) if lengths.groups is None else int(lengths.groups[row])
        tokens += response - 1 + (0 if (group, prompt) in prompts else prompt)
        logits += response
        if not lengths.apart:
            prompts.add((group, prompt))
        if lengths.squares is None:
            squares += (prompt + response - 1) ** 2
        else:
            squares += int(lengths.squares[row])
    work = cost.forward(tokens, logits, squares)
    if lengths.slots is not None:
        tokens = max(tokens, -(-sum(int(lengths.slots[row]) for row in rows) // WHOLE))
    return _Unit(tuple(int(row) for row in rows), tokens, work)


def _tree_unit(
    lengths: Lengths, tree: Beginnings, rows: Sequence[int] | Ints, cost: CostModel
) -> _Unit:
    """The same where all that rows of a group begin with alike is computed once."""
    used = [int(row) for row in rows if lengths.responses[row]]
    tokens = logits = squares = whole = 0
    for group in _groups(lengths, used):
        prompts, responses = lengths.prompts[group], lengths.responses[group]
        sizes, shared = prompts + responses - 1, tree.shared(group)
        tokens += int((sizes - shared).sum())
        logits += int((responses - (shared - prompts).clip(min=0)).sum())
        squares += int(lengths.squares_of(group).sum())
        whole += int(lengths.slots_of(group).sum())
    return _Unit(
        tuple(sorted(int(row) for row in rows)),
        max(tokens, -(-whole // WHOLE)),
        cost.forward(tokens, logits, squares),
    )


def _row_costs(lengths: Lengths, cost: CostModel) -> Floats:
    """Cost of each row when the row before it has paid for what both begin with."""
    if (tree := lengths.beginnings) is not None:
        costs = [_unit(lengths, [row], cost).cost for row in range(len(lengths))]
        for row in range(1, len(lengths)):
            (pair, *others) = _groups(lengths, [row - 1, row])
            if not others:
                costs[row] -= cost.per_token * int(tree.shared(pair)[1])
        return np.asarray(costs, dtype=np.float64)
    previous = None
    costs = []
    for row in range(len(lengths)):
        key = None if lengths.groups is None else (lengths.groups[row], lengths.prompts[row])
        alone = _unit(lengths, [row], cost).cost
        shared = key is not None and key == previous and lengths.responses[row] > 0
        shared = shared and not lengths.apart
        costs.append(alone - cost.per_token * int(lengths.prompts[row]) * shared)
        previous = key if lengths.responses[row] > 0 else previous
    return np.asarray(costs, dtype=np.float64)


def _check_budget(lengths: Lengths, budget: int) -> None:
    if not len(lengths):
        raise ValueError("The batch has no rows.")
    if (lengths.prompts < 1).any():
        row = int(lengths.prompts.argmin())
        raise ValueError(f"Row {row} has an empty prompt; a prompt needs at least one token.")
    tokens = np.where(lengths.responses > 0, lengths.prompts + lengths.responses - 1, 0)
    if tokens.max() > budget:
        raise ValueError(
            f"Row {int(tokens.argmax())} has {int(tokens.max())} tokens, more than "
            f"train.micro_batch_tokens = {budget}. Set that to the longest prompt plus response."
        )
    if lengths.slots is not None and lengths.slots.max() > WHOLE * budget:
        raise ValueError(
            f"The paths of row {int(lengths.slots.argmax())} have {int(lengths.slots.max())} tokens, "
            f"those that they share counted in each, more than {WHOLE} times "
            f"train.micro_batch_tokens = {budget}. Set that higher, or episodes.max_turns lower."
        )
