"""Splitting rows into parts of about equal weight."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.int64]

CONTIGUOUS_COST = 1.02  # a contiguous split may have a heaviest part this much heavier


def balanced(weights: Weights, n: int) -> list[Weights]:
    """`n` ascending lists of row numbers, of about equal sums of `weights` [N].

    Longest processing time first (Graham, 1969: the heaviest part is at most 4/3 of the best),
    unless the best contiguous split is about as good: its refs are smaller, and neighbours stay
    together. Each part has a row while there are rows enough. Deterministic.
    """
    greedy = _longest_first(weights, n)
    contiguous = _contiguous(weights, n)
    heaviest = max(int(weights[part].sum()) for part in greedy)
    if max(int(weights[part].sum()) for part in contiguous) <= CONTIGUOUS_COST * heaviest:
        return contiguous
    return greedy


def _longest_first(weights: Weights, n: int) -> list[Weights]:
    """The next heaviest row to the lightest part so far; ties by rows held, then by number."""
    parts: list[list[int]] = [[] for _ in range(n)]
    heap = [(0, 0, number) for number in range(n)]
    for row in np.argsort(-weights, kind="stable").tolist():
        total, held, number = heapq.heappop(heap)
        parts[number].append(row)
        heapq.heappush(heap, (total + int(weights[row]), held + 1, number))
    return [np.array(sorted(part), np.int64) for part in parts]


def _contiguous(weights: Weights, n: int) -> list[Weights]:
    """The contiguous split with the smallest heaviest part, by bisection over its weight."""
    rows = len(weights)
    sums = np.concatenate([[0], np.cumsum(weights)])
    low, high = int(weights.max(initial=0)), int(sums[-1])
    while low < high:
        middle = (low + high) // 2
        if len(_edges(sums, middle, n)) <= n + 1:
            high = middle
        else:
            low = middle + 1
    edges = _edges(sums, low, n)
    edges += [rows] * (n + 1 - len(edges))
    if rows >= n:  # the bisection fills the first parts; leave a row for each of the last ones
        for number in range(n - 1, 0, -1):
            edges[number] = min(edges[number], edges[number + 1] - 1)
    return [np.arange(a, b) for a, b in pairwise(edges)]


def _edges(sums: Weights, limit: int, n: int) -> list[int]:
    """Where parts of at most `limit` begin and end; gives up after n + 1 parts."""
    edges = [0]
    rows = len(sums) - 1
    while edges[-1] < rows and len(edges) <= n + 1:
        edges.append(int(np.searchsorted(sums, sums[edges[-1]] + limit, side="right")) - 1)
    return edges
