"""Splitting costs into parts of nearly equal sums: any items to any part, or neighbours only.

engines/train/batching/packing.py makes the plans of a batch with it. numpy only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

REFINEMENT_ROUNDS = 1000  # exchanges tried at most; large splits are within 0.1 % long before
DIFFERENCING_LIMIT = 2**18  # items x parts, beyond which differencing is no start, only the bound


def partition(
    costs: Sequence[float] | Ints | Floats, parts: int, *, equal_size: bool = False
) -> list[list[int]]:
    """Split items into `parts` lists of nearly equal cost, deterministically.

    Two starts (largest first; Karmarkar and Karp's largest differencing, 1982) are improved by moves
    and swaps between parts; the one whose heaviest part is lighter wins. Largest differencing with
    its ties broken as verl breaks them is the bound: where that is lighter still, it is improved and
    taken instead. docs/decisions/balanced-plans.md says why it is no third start.

    Args:
        costs: [N] cost of each item, >= 0, in any unit.
        parts: Number of lists, at most N.
        equal_size: Every list gets N / parts items.

    Returns:
        Item numbers in `parts` lists, each ascending and not empty.

    Raises:
        ValueError: Fewer items than parts, or an indivisible number with equal_size.

    Example:
        partition([5, 4, 3, 2], 2) == [[0, 3], [1, 2]]
    """
    values = np.asarray(costs, dtype=np.float64)
    if parts < 1 or len(values) < parts:
        raise ValueError(f"{len(values)} items cannot fill {parts} parts.")
    if equal_size and len(values) % parts:
        raise ValueError(f"{len(values)} items do not divide into {parts} parts of equal size.")
    size = len(values) // parts if equal_size else None
    starts = [_largest_first(values, parts, size)]
    if len(values) * parts <= DIFFERENCING_LIMIT:
        starts.append(_differencing(values, parts, equal_size, by_size=False))
    results = []
    for members in starts:
        _refine(values, members, moves=not equal_size)
        loads = [float(values[part].sum()) for part in members]
        results.append((max(loads), -min(loads), members))
    best = [sorted(part) for part in min(results, key=lambda result: result[:2])[2]]
    bound = [sorted(part) for part in _differencing(values, parts, equal_size, by_size=True)]
    if _heaviest(values, bound) < _heaviest(values, best):
        _refine(values, bound, moves=not equal_size)
        best = [sorted(part) for part in bound]
    return best


def largest_first(costs: Sequence[float] | Ints | Floats, parts: int) -> list[list[int]]:
    """As `partition`, by its first start alone: for splits too large for what improves it."""
    values = np.asarray(costs, dtype=np.float64)
    return [sorted(part) for part in _largest_first(values, parts, None)]


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into few bins: the largest first, each into the first bin that has room for it.

    First-fit decreasing (Johnson, 1974): at most 11/9 of the fewest bins, and one more.

    Args:
        sizes: [N] of each item, at most `capacity`.
        capacity: Of a bin, in the same unit.

    Returns:
        Item numbers of each bin, ascending.

    Example:
        first_fit([6, 5, 4, 3], 9) == [[0, 3], [1, 2]]
    """
    free = np.full(len(sizes), capacity, np.int64)
    bins: list[list[int]] = [[] for _ in sizes]
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        place = int(np.argmax(free >= sizes[item]))
        free[place] -= sizes[item]
        bins[place].append(item)
    return [sorted(items) for items in bins if items]


def contiguous_cuts(costs: Floats, parts: int) -> list[int]:
    """Cut a sequence into contiguous ranges whose largest cost is the least possible.

    Args:
        costs: [N] cost of each item, >= 0, in any unit.
        parts: Number of ranges; more than N leaves some empty.

    Returns:
        Edges [parts + 1], from 0 to N: range p is items edges[p] to edges[p + 1] - 1.

    Example:
        contiguous_cuts([1, 9, 1, 1, 8], 2) == [0, 2, 5]
    """
    sums = np.concatenate([[0.0], np.cumsum(costs)])

    def cut(limit: float) -> list[int]:
        edges = [0]
        for _ in range(parts):
            edges.append(int(np.searchsorted(sums, sums[edges[-1]] + limit, side="right")) - 1)
        return edges

    low, high = float(sums[-1]) / parts, float(sums[-1])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle)[-1] == len(costs) else (middle, high)
    return [*cut(high * (1 + 1e-12))[:-1], len(costs)]


def _heaviest(values: Floats, members: list[list[int]]) -> float:
    return max(float(values[part].sum()) for part in members)


def _largest_first(values: Floats, parts: int, capacity: int | None) -> list[list[int]]:
    """The next largest item to the lightest part so far (Graham, 1969)."""
    members: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, part) for part in range(parts)]
    for item in np.argsort(-values, kind="stable").tolist():
        load, part = heapq.heappop(heap)
        members[part].append(item)
        if capacity is None or len(members[part]) < capacity:
            heapq.heappush(heap, (load + float(values[item]), part))
    return _without_empty(members)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Split:
    """Some of the items in `parts` parts, heaviest first."""

    sums: Floats  # [parts]
    counts: Ints  # [parts] items
    firsts: Ints  # [parts] number of the item that came first; -1 for none
    items: list[int]  # of a split that was not merged: one in each of the first parts
    # What it was merged of: part order[p] of the heavy one, and that part from the end of the light.
    merged: tuple[_Split, _Split, Ints] | None = None

    @property
    def spread(self) -> float:
        return float(self.sums[0] - self.sums[-1])

    def members(self) -> list[list[int]]:
        """Items of each part, in the order in which they were merged."""
        parts_of_items: list[list[int]] = [[] for _ in self.sums]
        stack = [(self, np.arange(len(self.sums)))]
        while stack:
            split, parts = stack.pop()  # parts: where in `found` each part of the split goes
            if split.merged is None:
                for item, part in zip(split.items, parts.tolist(), strict=False):
                    parts_of_items[part].append(item)
                continue
            heavy, light, order = split.merged
            before = np.empty_like(parts)
            before[order] = parts
            stack += [(light, before[::-1]), (heavy, before)]
        return parts_of_items


def _differencing(
    values: Floats, parts: int, equal_size: bool, *, by_size: bool
) -> list[list[int]]:
    """Merge the two splits of largest spread, heaviest part with lightest, until one is left.

    A split begins as one item; with equal sizes as `parts` neighbours in the order of cost. Ties
    between equal spreads or sums go to what came first; by_size: to the part of more items, then of
    the later ones, as in verl's karmarkar_karp.
    """
    numbers = np.arange(len(values))
    order = np.lexsort((-numbers if by_size else numbers, -values))
    width = parts if equal_size else 1
    heap: list[tuple[tuple[float, ...], int, _Split]] = []

    def push(first: int, split: _Split) -> None:
        # The items are in one split each, so that `first` decides every tie that is left.
        largest = (-split.sums[0], -split.counts[0], -split.firsts[0]) if by_size else ()
        heapq.heappush(heap, ((-split.spread, *largest), first, split))

    for first in range(0, len(values), width):
        push(first, _single(values, order[first : first + width], parts))
    while len(heap) > 1:
        _, first, heavy = heapq.heappop(heap)
        _, _, light = heapq.heappop(heap)
        push(first, _merge(heavy, light, by_size))
    return _without_empty(heap[0][2].members())


def _single(values: Floats, items: Ints, parts: int) -> _Split:
    """A split of one item in each of the first parts."""
    empty = parts - len(items)
    return _Split(
        sums=np.append(values[items], np.zeros(empty)),
        counts=np.repeat([1, 0], [len(items), empty]),
        firsts=np.append(items, np.full(empty, -1)),
        items=items.tolist(),
    )


def _merge(heavy: _Split, light: _Split, by_size: bool) -> _Split:
    sums, counts = heavy.sums + light.sums[::-1], heavy.counts + light.counts[::-1]
    firsts = np.where(heavy.counts > 0, heavy.firsts, light.firsts[::-1])
    order = np.lexsort((-firsts, -counts, -sums) if by_size else (-sums,))  # stable
    return _Split(
        sums=sums[order],
        counts=counts[order],
        firsts=firsts[order],
        items=[],
        merged=(heavy, light, order),
    )


def _without_empty(members: list[list[int]]) -> list[list[int]]:
    """Give every part an item: zero costs can leave parts empty."""
    for part in members:
        if not part:
            part.append(max(members, key=len).pop())
    return members


def _refine(values: Floats, members: list[list[int]], *, moves: bool) -> None:
    """Improve `members` in place until no exchange with the heaviest part helps."""
    loads = np.array([values[part].sum() for part in members])
    for _ in range(REFINEMENT_ROUNDS):
        if not (_relieve(values, members, loads, moves) or _fill(values, members, loads, moves)):
            return


def _relieve(values: Floats, members: list[list[int]], loads: Floats, moves: bool) -> bool:
    """One exchange that lightens the heaviest part; False when there is none."""
    heavy = int(loads.argmax())
    return any(
        _exchange(values, members, loads, heavy, int(other), moves)
        for other in np.argsort(loads, kind="stable")
        if other != heavy
    )


def _fill(values: Floats, members: list[list[int]], loads: Floats, moves: bool) -> bool:
    """One exchange that loads the lightest part; False when there is none."""
    light = int(loads.argmin())
    return any(
        _exchange(values, members, loads, int(other), light, moves)
        for other in np.argsort(-loads, kind="stable")
        if other != light
    )


def _exchange(
    values: Floats, members: list[list[int]], loads: Floats, heavy: int, light: int, moves: bool
) -> bool:
    """The move or swap that brings two parts closest together; False when none does."""
    gap = loads[heavy] - loads[light]
    if gap <= 0:
        return False
    giving, taking = values[members[heavy]], values[members[light]]
    # shift[i, j]: cost that leaves `heavy` when its item i goes for item j; the last column, a move
    shift = giving[:, None] - np.append(taking, 0.0)[None, :]
    if not moves or len(giving) == 1:
        shift = shift[:, :-1]
    if not shift.size:
        return False
    useful = (shift > 0) & (shift < gap)
    distance = np.where(useful, np.abs(shift - gap / 2), np.inf)
    best = int(distance.argmin())
    if not np.isfinite(distance.flat[best]):
        return False
    give, take = divmod(best, shift.shape[1])
    moved = members[heavy].pop(give)
    if take < len(taking):
        members[heavy].append(members[light].pop(take))
    members[light].append(moved)
    loads[heavy] = values[members[heavy]].sum()
    loads[light] = values[members[light]].sum()
    return True
