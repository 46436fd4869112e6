"""The requests of an episode as a forest: which tokens each token of a row goes on after.

An agent that asks in parallel, starts others or shortens its history does not grow one conversation.
Its row has the forest laid end to end: `response_ids` are its nodes, conversation by conversation,
each after the node that it goes on from, each token once; every column over the response tokens is in
that order, whenever the requests came. A row without the columns of this module is one path, and so
is one whose nodes each go on after the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from storage.batches.refs import BatchRef
from storage.objects.store import Store

# Their columns; see storage/batches/columns.py.
LENGTHS, PARENTS = "node_lengths", "node_parents"

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forest:
    """Where the tokens of a row's P prompt tokens and R response tokens, laid end to end, go on.

    A node is what a request added: what others said, then what the policy wrote. Its parent p says
    that it goes on after token p - 1, whose own path is its context. P: right after the prompt. 0: a
    conversation of its own, which no other token comes before.

    Example: after the prompt [5, 6] came 7 8 9; from 8 on it was asked again and said 4; and another
    conversation is 3 2
        Forest(prompt=2, lengths=[3, 1, 2], parents=[2, 4, 0])
        .paths() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [6, 7]]
        .before == [1, 2, 3, 3, -1, 6]
        .positions == [0, 1, 2, 3, 4, 4, 0, 1]
    """

    prompt: int  # P
    lengths: Ints  # [S] tokens of each node, R together
    parents: Ints  # [S] each at most P + the node's first token

    def __post_init__(self) -> None:
        lengths, parents = self.lengths, self.parents
        if len(lengths) != len(parents):
            raise ValueError(
                f"A row has {len(lengths)} {LENGTHS} and {len(parents)} {PARENTS}; each node has one "
                "of both."
            )
        if (wrong := np.flatnonzero(lengths < 1)).size:
            node = int(wrong[0])
            raise ValueError(
                f"{LENGTHS} of node {node} is {int(lengths[node])}; a node has at least one token."
            )
        if (wrong := np.flatnonzero((parents < 0) | (parents > self.starts))).size:
            node = int(wrong[0])
            raise ValueError(
                f"{PARENTS} of node {node} is {int(parents[node])}; it is 0 to "
                f"{int(self.starts[node])}, a number of tokens before the node."
            )

    @property
    def starts(self) -> Ints:
        """[S] number of each node's first token."""
        return self.prompt + np.cumsum(self.lengths) - self.lengths

    @property
    def tokens(self) -> int:
        """P + R."""
        return self.prompt + int(self.lengths.sum())

    @property
    def one_path(self) -> bool:
        """Whether each node goes on after the one before it, the first after the prompt."""
        return bool((self.parents == self.starts).all())

    @property
    def before(self) -> Ints:
        """[R] number of the token before each response token; -1: it begins a conversation."""
        found = np.arange(self.prompt - 1, self.tokens - 1)
        found[self.starts - self.prompt] = self.parents - 1
        return found

    @property
    def positions(self) -> Ints:
        """[P + R] tokens that each token's path has before it."""
        found = np.arange(self.tokens)
        for start, length, parent in self._nodes():
            first = int(found[parent - 1]) + 1 if parent else 0
            found[start : start + length] = np.arange(first, first + length)
        return found

    def context(self, node: int) -> Ints:
        """Numbers of the tokens that a node goes on after, in their order."""
        return self.path_to(int(self.parents[node]))

    def path_to(self, end: int) -> Ints:
        """Numbers of the tokens of the path whose last one is token end - 1; 0: of none."""
        parts: list[Ints] = []
        starts = self.starts
        while end > self.prompt:
            node = int(np.searchsorted(starts, end - 1, side="right")) - 1
            parts.append(np.arange(starts[node], end))
            end = int(self.parents[node])
        return np.concatenate([np.arange(end), *reversed(parts)])

    def branches(self) -> dict[int, Ints]:
        """By a node's first response token its context, where that is not what was made before it."""
        apart = np.flatnonzero(self.parents != self.starts).tolist()
        return {int(self.starts[node]) - self.prompt: self.context(node) for node in apart}

    def paths(self) -> list[Ints]:
        """Numbers of each path's tokens, from its first one to a node's end after which none goes on.

        Each response token is in at least one; in the order of the nodes that end them.
        """
        ends = self.starts + self.lengths
        return [self.path_to(int(end)) for end in ends[~np.isin(ends, self.parents)]]

    def path_lengths(self) -> Ints:
        """[paths] tokens of each path."""
        ends = self.starts + self.lengths
        return self.positions[ends[~np.isin(ends, self.parents)] - 1] + 1

    def check_row(self, response: int, trained: NDArray[np.generic] | None = None) -> None:
        """ValueError unless the nodes are those of a row's response tokens.

        Args:
            response: R.
            trained: [R] of the row's response_mask. The first token of a conversation of its own has
                nothing that predicts it, so it is 0 there.
        """
        if (own := self.tokens - self.prompt) != response:
            raise ValueError(f"{LENGTHS} of a row add up to {own}; its response has {response}.")
        if trained is None:
            return
        roots = (self.starts - self.prompt)[self.parents == 0]
        if (wrong := roots[trained[roots] != 0]).size:
            raise ValueError(
                f"Response token {int(wrong[0])} begins a conversation of its own, so nothing "
                "predicts it, and response_mask has it trained. Its first tokens are its prompt: set "
                "their mask to 0."
            )

    def _nodes(self) -> list[tuple[int, int, int]]:
        """Start, length and parent of each node."""
        return list(
            zip(self.starts.tolist(), self.lengths.tolist(), self.parents.tolist(), strict=True)
        )


def forest_of(prompt: int, response: int, lengths: Ints, parents: Ints) -> Forest:
    """The forest of a row with so many tokens; without nodes it is one path. Errors are Forest's."""
    if not len(lengths) and not len(parents) and response:
        lengths, parents = np.array([response]), np.array([prompt])
    forest = Forest(
        prompt=prompt, lengths=lengths.astype(np.int64), parents=parents.astype(np.int64)
    )
    forest.check_row(response)
    return forest


def read_forests(store: Store, batch: BatchRef) -> list[Forest] | None:
    """[N] of stored samples; None where they do not have the columns: each is one path."""
    if LENGTHS not in batch.names:
        return None
    columns = (cast("list[Ints]", batch.fetch_list(store, name)) for name in (LENGTHS, PARENTS))
    sizes = (batch.lengths(store, name).tolist() for name in ("prompt_ids", "response_ids"))
    return [
        forest_of(prompt, response, lengths, parents)
        for prompt, response, lengths, parents in zip(*sizes, *columns, strict=True)
    ]
