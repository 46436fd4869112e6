"""Splitting numbers into parts of nearly equal sums. numpy only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

REFINEMENT_ROUNDS = 1000  # exchanges tried at most; large splits are within 0.1 % long before
DIFFERENCING_LIMIT = 2**18  # items x parts; beyond, differencing takes seconds and gains nothing


def partition(
    costs: Sequence[float] | Ints | Floats, parts: int, *, equal_size: bool = False
) -> list[list[int]]:
    """Split items into `parts` lists of nearly equal cost, deterministically.

    Two starts (largest first; Karmarkar and Karp's differencing, 1982) are improved by moves and
    swaps between parts; the one whose heaviest part is lighter wins. With equal_size every part
    gets as many items. Raises ValueError for fewer items than parts, or an indivisible number.
    """
    values = np.asarray(costs, dtype=np.float64)
    if parts < 1 or len(values) < parts:
        raise ValueError(f"{len(values)} items cannot fill {parts} parts.")
    if equal_size and len(values) % parts:
        raise ValueError(f"{len(values)} items do not divide into {parts} parts of equal size.")
    size = len(values) // parts if equal_size else None
    starts = [_largest_first(values, parts, size)]
    if len(values) * parts <= DIFFERENCING_LIMIT:
        starts.append(_differencing(values, parts, equal_size))
    results = []
    for members in starts:
        _refine(values, members, moves=not equal_size)
        loads = [float(values[part].sum()) for part in members]
        results.append((max(loads), -min(loads), members))
    return [sorted(part) for part in min(results, key=lambda result: result[:2])[2]]


def _largest_first(values: Floats, parts: int, capacity: int | None) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, part) for part in range(parts)]
    for item in np.argsort(-values, kind="stable").tolist():
        load, part = heapq.heappop(heap)
        members[part].append(item)
        if capacity is None or len(members[part]) < capacity:
            heapq.heappush(heap, (load + float(values[item]), part))
    return _without_empty(members)


def _differencing(values: Floats, parts: int, equal_size: bool) -> list[list[int]]:
    """Merge the two partial splits of largest spread, heaviest part with lightest, until one is left.

    With equal sizes a partial split starts from `parts` neighbours in the order of cost.
    """
    order = np.argsort(-values, kind="stable").tolist()
    width = parts if equal_size else 1
    heap = []
    for first in range(0, len(order), width):
        split = [(float(values[item]), [item]) for item in order[first : first + width]]
        split += [(0.0, []) for _ in range(parts - len(split))]
        heap.append((split[-1][0] - split[0][0], first, split))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, heavy = heapq.heappop(heap)
        _, _, light = heapq.heappop(heap)
        merged = [
            (a + b, rows + others)
            for (a, rows), (b, others) in zip(heavy, reversed(light), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], first, merged))
    return _without_empty([rows for _, rows in heap[0][2]])


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
