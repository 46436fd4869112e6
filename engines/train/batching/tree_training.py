"""Tree training: what rows begin with alike, found from their tokens, so that it is computed once.

Rows form a tree whose nodes are tokens (Wang et al., arXiv:2511.00413; AReaL has the word too). In
the order of their tokens, neighbours have most in common, and of any rows in that order the distinct
tokens are those that each does not share with the one before it. Which rows stay together is decided
in packing.py, how they lie in a micro-batch in micro_batch.py. Without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from storage.batches.forest import read_forests
from storage.batches.refs import BatchRef
from storage.objects.store import Store

READ_ROWS = 4096  # whole groups of about so many rows are read at once for a plan

_JUMP = 2**32  # more than any token's number

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginnings:
    """What the rows of each group of a batch begin with alike.

    Example: rows [5, 6, 8], [5, 7], [5, 6] of one group are in the order 2, 0, 1
        Beginnings(places=[1, 2, 0], common=[0, 2, 1])
    """

    places: Ints  # [N] of each row: its place, where groups follow each other, in their own order
    common: Ints  # [N] at each place: tokens that the row there shares with the row before it

    def shared(self, rows: Sequence[int]) -> Ints:
        """[n] tokens that each of some rows of one group shares with the row before it.

        rows: In the order of their places.
        """
        places = self.places[np.asarray(rows, dtype=np.int64)]
        lengths = [int(self.common[a + 1 : b + 1].min()) for a, b in pairwise(places.tolist())]
        return np.array([0, *lengths][: len(places)], dtype=np.int64)


def in_order(rows: Sequence[npt.NDArray[np.integer]]) -> tuple[list[int], list[int]]:
    """Rows in the order of their tokens, and what each has in common with the one before it.

    Returns:
        Row numbers, and as many numbers of tokens, the first of them 0. Equal rows stay in their
        order.

    Example:
        in_order([[5, 6, 8], [5, 7], [5, 6]]) == ([2, 0, 1], [0, 2, 1])
    """
    big = [np.ascontiguousarray(row, dtype=">i8") for row in rows]  # bytes in the order of numbers
    order = sorted(range(len(rows)), key=lambda row: big[row].tobytes())
    common = [0 for _ in order]
    for place in range(1, len(order)):
        before, row = rows[order[place - 1]], rows[order[place]]
        least = min(len(before), len(row))
        differs = np.flatnonzero(before[:least] != row[:least])
        common[place] = int(differs[0]) if len(differs) else least
    return order, common


def read_beginnings(store: Store, batch: BatchRef, groups: Ints | None) -> Beginnings:
    """Find what the rows of each group begin with alike; reads every token of the batch.

    The last token of a row is left out: it is only ever a label.

    Args:
        store: Where the batch's objects are.
        batch: [N] rows with prompt_ids and response_ids.
        groups: [N] group numbers; None: every row is on its own.
    """
    places = np.zeros(len(batch), dtype=np.int64)
    common = np.zeros(len(batch), dtype=np.int64)
    start = 0
    for part in _whole_groups(np.arange(len(batch)) if groups is None else groups):
        tokens = _tokens(store, batch.take(np.concatenate(part)))
        for rows in part:
            own = [next(tokens) for _ in rows]
            order, shared = in_order(own)
            places[rows[order]] = np.arange(start, start + len(rows))
            common[start : start + len(rows)] = shared
            start += len(rows)
    return Beginnings(places=places, common=common)


def _whole_groups(groups: Ints) -> Iterator[list[Ints]]:
    """The rows of each group, some groups at a time."""
    order = np.argsort(groups, kind="stable")
    edges = np.flatnonzero(np.diff(groups[order])) + 1
    part: list[Ints] = []
    for rows in np.split(order, edges):
        part.append(rows)
        if sum(map(len, part)) >= READ_ROWS:
            yield part
            part = []
    if part:
        yield part


def _tokens(store: Store, batch: BatchRef) -> Iterator[Ints]:
    """Each row's prompt and response without its last token; of a row without response nothing."""
    prompts, starts = batch.fetch_numpy(store, "prompt_ids")
    responses, edges = batch.fetch_numpy(store, "response_ids")
    assert starts is not None and edges is not None
    forests = read_forests(store, batch)
    for row in range(len(batch)):
        response = responses[edges[row] : edges[row + 1]]
        prompt = prompts[starts[row] : starts[row + 1] if len(response) else starts[row]]
        tokens = np.concatenate([prompt, response]).astype(np.int64)[:-1]
        if forests is not None and not forests[row].one_path:
            # A node that goes on elsewhere than after the one before it: equal tokens of two rows
            # are shared only where their nodes are too.
            jumps = np.arange(len(prompt) - 1, len(tokens)) - forests[row].before
            tokens[len(prompt) :] += jumps[:-1] * _JUMP
        yield tokens
