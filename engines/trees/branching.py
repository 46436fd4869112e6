"""How a prompt's tree grows: which paths go on, in how many ways, which are leaves. No tokens here.

A node is a segment of some completions; node 0 is the prompt. A path stands for some of the prompt's
n leaves, its share: what branches hands its share on to its branches, so the shares of the paths that
go on and of those that are over are n together, at every time.

All paths that go on are sampled one segment further at once: a level. `settle` says, of a level that
was sampled, which shares its nodes have; `branches` says what is sampled next. Both are functions of
the prompt's tree alone, so the same tree comes out wherever and beside whatever it grows.

Where no share is handed to another path (fall_back off, by even), every leaf alone is distributed as
an independent completion, and so the mean over the n leaves of anything is unbiased: a path with
share s adds s f(leaf) if it is over, else its branches' shares add up to s, each a draw of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs.tree import DrawnDivergence, TreeSettings

PROMPT = 0  # number of the node that is the prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A segment that is to be sampled."""

    number: int  # of its node in the prompt's tree, from 1
    parent: int  # number of the node that it follows
    place: int  # among those that follow the parent, from 0
    depth: int  # segments of its path, itself counted
    share: int  # leaves that it stands for


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeNode:
    """A segment that was sampled."""

    number: int
    parent: int
    depth: int
    share: int  # leaves that it stands for
    over: bool  # whether its path ends here
    logprob: float  # mean over its tokens, in nats


class Noise:
    """Where a prompt's tree draws: from its seed and what is drawn for, in no order."""

    def __init__(self, seed: int | None, step: int, group: int) -> None:
        """`seed`: rollout.seed; None: not reproducible."""
        self._begin = None if seed is None else f"{seed}/{step}/{group}"

    def of(self, what: str) -> random.Random:
        """The generator of one thing that is drawn."""
        return random.Random(None if self._begin is None else f"{self._begin}/{what}")


def settle(level: Sequence[TreeNode], tree: TreeSettings) -> list[TreeNode]:
    """The nodes of a level with the shares that they have now.

    Args:
        level: the prompt's nodes of a level, in the order of their numbers.
        tree: the recipe's.
    """
    nodes, missing = list(level), 0
    if tree.fall_back:
        missing = sum(node.share - 1 for node in nodes if node.over)
        nodes = [replace(node, share=1) if node.over else node for node in nodes]
    going = [place for place, node in enumerate(nodes) if not node.over]
    if not going:
        return nodes
    shares = [nodes[place].share for place in going]
    if tree.by == "logprob":
        weights = [tree.logprob_weight * nodes[place].logprob for place in going]
        shares = by_weight(sum(shares) + missing, weights)
    else:
        for _ in range(missing):  # to whoever has least; of those, the first
            shares[shares.index(min(shares))] += 1
    for place, share in zip(going, shares, strict=True):
        nodes[place] = replace(nodes[place], share=share)
    return nodes


def by_weight(total: int, logarithms: Sequence[float]) -> list[int]:
    """`total` in parts of at least 1 that go by exp(logarithm), by the largest remainders.

    At least as many as there are logarithms: 7 by [0, log 3] are [2, 5].
    """
    top = max(logarithms)
    weights = [math.exp(logarithm - top) for logarithm in logarithms]
    left = total - len(weights)
    exact = [left * weight / sum(weights) for weight in weights]
    parts = [1 + math.floor(logarithm) for logarithm in exact]
    order = sorted(range(len(exact)), key=lambda i: (math.floor(exact[i]) - exact[i], i))
    for place in order[: total - sum(parts)]:
        parts[place] += 1
    return parts


def branches(nodes: Sequence[TreeNode], n: int, tree: TreeSettings, noise: Noise) -> list[Branch]:
    """What is sampled next of a prompt; nothing once its tree has n leaves.

    Args:
        nodes: all of its nodes so far, in the order of their numbers, settled.
        n: its leaves.
        tree: the recipe's.
        noise: the prompt's.
    """
    parents = {node.parent for node in nodes}
    if not nodes:
        wanted = split(PROMPT, 0, n, tree, noise)
    else:
        going = [node for node in nodes if not node.over and node.number not in parents]
        wanted = [
            one for node in going for one in split(node.number, node.depth, node.share, tree, noise)
        ]
        if not wanted:
            missing = n - sum(node.share for node in nodes if node.over)
            wanted = fall_back_branches(nodes, missing, tree, noise)
    followers: dict[int, int] = {}
    for node in nodes:
        followers[node.parent] = followers.get(node.parent, 0) + 1
    planned = []
    for number, (parent, depth, share) in enumerate(wanted, len(nodes) + 1):
        place = followers.get(parent, 0)
        followers[parent] = place + 1
        planned.append(Branch(number=number, parent=parent, place=place, depth=depth, share=share))
    return planned


def split(
    parent: int, depth: int, share: int, tree: TreeSettings, noise: Noise
) -> list[tuple[int, int, int]]:
    """The branches of a node: its number, their depth, their shares, as even as can be.

    The last segments of paths stand for one leaf each.
    """
    width = share
    if depth + 1 < tree.depth:
        divergence = tree.divergence
        if isinstance(divergence, DrawnDivergence):
            drawn = noise.of(f"width/{parent}").randint(divergence.fewest, divergence.most)
        else:
            drawn = divergence.width
        width = min(share, drawn)
    each, more = divmod(share, width)
    return [(parent, depth + 1, each + (place < more)) for place in range(width)]


def fall_back_branches(
    nodes: Sequence[TreeNode], missing: int, tree: TreeSettings, noise: Noise
) -> list[tuple[int, int, int]]:
    """Branches for leaves that are missing where no path goes on: after earlier nodes, drawn.

    Any node after which a path went on, or the prompt; by = logprob draws by the log-probs. Each
    branch stands for one leaf.
    """
    if missing == 0:
        return []
    inner = [node for node in nodes if not node.over]
    places = [(PROMPT, 0), *((node.number, node.depth) for node in inner)]
    weights = [1.0] * len(places)
    if tree.by == "logprob":
        logarithms = [0.0, *(tree.logprob_weight * node.logprob for node in inner)]
        top = max(logarithms)
        weights = [math.exp(logarithm - top) for logarithm in logarithms]
    drawn = noise.of(f"fall-back/{len(nodes)}").choices(places, weights, k=missing)
    return [(number, depth + 1, 1) for number, depth in sorted(drawn)]


def path_of(nodes: Sequence[TreeNode], number: int) -> list[int]:
    """Numbers of the nodes from the prompt, which is left out, to a node."""
    path = []
    while number != PROMPT:
        path.append(number)
        number = nodes[number - 1].parent
    return path[::-1]


def leaves(nodes: Sequence[TreeNode]) -> list[int]:
    """The node of each leaf of a tree that has all of them; one comes as often as it stands for."""
    return [node.number for node in nodes if node.over for _ in range(node.share)]
