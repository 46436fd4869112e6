"""Advantages of completions that are the leaves of trees: each is compared within its subtrees.

A prompt's completions share segments: the tree's nodes are segments, a completion is a path from the
prompt to a leaf (`Paths`). A subtree is a node with the completions that go through it; the prompt
itself is the subtree of the whole group. r is the reward of a completion, V the value of a node.

Each takes an AdvantageBatch of N samples and T tokens, with `paths`, and answers Advantages [T], 0
where masked; without paths every sample is a path of one segment, whose group is the only subtree.
`lone` says what stands for a sample alone in its group: "reward" (its reward as it is, as in the
reference) or "zero". A sample without a reward (NaN) counts nowhere and gets 0. Statistics are in
float64.

`prefix_weight` says how often the tokens of a shared segment train. "per_leaf": in every completion
that has them, so a segment of m completions counts m times; with one weight per completion this is
the policy gradient, since each completion by itself is a draw from the policy. "once": in one of
them, with the mean advantage of all that share them. Where the ratio is 1 the gradient of that is the
sum over distinct nodes of the mean advantage times the nodes' log-probs, which is what a weight of
1/m on every copy gives too. Beyond the first optimizer step the two differ: a clipped loss looks at
the sign of the advantage, and copies of one token whose advantages differ in sign would be clipped on
both sides, although it was drawn once. Means over tokens then count each distinct token once, and so
do KL and entropy terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.algorithms.aggregation import divide
from engines.algorithms.group_advantages import Groups, whitened_rows
from engines.algorithms.inputs import AdvantageBatch, Advantages, Paths


def tree(
    batch: AdvantageBatch,
    *,
    weight: str,
    drop_equal_subgroups: bool,
    scale: str,
    epsilon: float,
    lone: str,
    whiten: bool,
    prefix_weight: str,
) -> Advantages:
    """TreePO: A_i = sum_g w_g (r_i - mean(r_g)) over the subtrees g that i is in. arXiv:2508.17445.

    The subtrees are the group and those of the path's nodes above the leaf that have more than one
    completion. One segment per completion makes this Dr. GRPO's advantage (REINFORCE++'s with the
    group's baseline, where whitened).

    Args:
        batch: N samples, with paths.
        weight: w_g in proportion to the subtree's completions ("group_size"), or equal ("average").
        drop_equal_subgroups: leave out subtrees below the group whose rewards are all equal.
        scale: "none", or "prompt_std": divide by the group's standard deviation (divisor n - 1).
        epsilon: added to that deviation, in units of reward.
        lone: "reward" or "zero" for a group of one.
        whiten: scale to mean 0 and variance 1 over all tokens with mask 1.
        prefix_weight: "per_leaf" or "once", see above.
    """
    rewards, paths = batch.totals(), batch.paths_or_flat()
    inner = paths.inner()
    ids, rows = _entries(batch, paths, inner)
    present = ~rewards.isnan()
    subtrees = Groups.of(ids, present[rows])
    centred = _against_mean(subtrees, rewards[rows])
    first = len(rewards)  # the groups themselves come first
    alone = subtrees.alone() & (torch.arange(len(ids), device=ids.device) < first)
    fallback = rewards.double()[rows] if lone == "reward" else torch.zeros_like(centred)
    centred = torch.where(alone, fallback, centred)
    counts = subtrees.sizes[subtrees.member] > 1
    if drop_equal_subgroups:
        counts = counts & ~subtrees.uniform(rewards[rows])[subtrees.member]
    counts[:first] = True
    weights = (
        subtrees.sizes[subtrees.member] if weight == "group_size" else torch.ones_like(centred)
    )
    per_row = _weighted_mean(len(rewards), rows, centred, torch.where(counts, weights, 0.0))
    if scale == "prompt_std":
        groups = Groups.of(batch.groups, present)
        per_row = divide(per_row, groups.deviation(rewards)[groups.member] + epsilon)
    per_token = batch.at_tokens(torch.where(present, per_row, 0.0))
    return _finished(batch, paths, per_token, whiten, prefix_weight)


def tree_segment(
    batch: AdvantageBatch, *, discount: float, whiten: bool, prefix_weight: str
) -> Advantages:
    """TreePO by segments: what a segment adds to the value of the node before it. arXiv:2508.17445.

    The k-th of K segments of a path gets A_k = V(node) - discount^(K - k + 1) V(node before), V = 0
    of the prompt. V of a leaf is its reward against all subtrees of its path, the leaf's own among
    them, each weighted by its completions (as `tree` by group_size); V of any other node is the mean
    over the nodes that follow it.

    Args:
        batch: N samples, with paths.
        discount: of the value before, in [0, 1]; 1 takes it off in full.
        whiten: scale to mean 0 and variance 1 over all tokens with mask 1.
        prefix_weight: "per_leaf" or "once", see above.
    """
    rewards, paths = batch.totals(), batch.paths_or_flat()
    present = ~rewards.isnan()
    ids, rows = _entries(batch, paths, torch.ones_like(paths.nodes, dtype=torch.bool))
    subtrees = Groups.of(ids, present[rows])
    centred = _against_mean(subtrees, rewards[rows])
    modified = _weighted_mean(len(rewards), rows, centred, subtrees.sizes[subtrees.member])
    nodes = _Nodes(batch, paths, present)
    values = nodes.values(modified)
    remaining = paths.rows.lengths[paths.rows.ids] - paths.rows.within()  # K - k + 1
    before = nodes.before(values)
    added = values[nodes.member] - discount ** remaining.double() * before
    return _by_segment(batch, paths, added, present, whiten, prefix_weight)


def tree_sibling(
    batch: AdvantageBatch, *, lone: str, whiten: bool, prefix_weight: str
) -> Advantages:
    """Segments against their siblings: A_k = S(node) - S(node before), S = 0 of the prompt.

    S = (V - mean) / std over the nodes that follow the same node (std with the divisor n), 0 where
    their values are equal; V of a leaf is its reward, V of any other node the mean over those that
    follow it. Segment policy optimisation, arXiv:2505.23564, on a tree.

    Args:
        batch: N samples, with paths.
        lone: S of a node without siblings: its value ("reward") or "zero".
        whiten: scale to mean 0 and variance 1 over all tokens with mask 1.
        prefix_weight: "per_leaf" or "once", see above.
    """
    rewards, paths = batch.totals(), batch.paths_or_flat()
    present = ~rewards.isnan()
    nodes = _Nodes(batch, paths, present)
    values = nodes.values(rewards.double())
    siblings = Groups.of(nodes.siblings, nodes.counted)
    centred = _against_mean(siblings, values)
    spread = siblings.mean(centred.square())[siblings.member].sqrt()
    fallback = values if lone == "reward" else torch.zeros_like(values)
    scaled = torch.where(siblings.alone(), fallback, divide(centred, spread))
    added = scaled[nodes.member] - nodes.before(scaled)
    return _by_segment(batch, paths, added, present, whiten, prefix_weight)


def _entries(batch: AdvantageBatch, paths: Paths, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """A number for each subtree that a sample is in, and the sample: int64 [N + chosen] each.

    chosen, bool [S]: segments whose nodes are taken, beside the group of each sample, which come
    first and in the samples' order.
    """
    groups = Groups.of(batch.groups).member
    keys = paths.keys(groups)
    count = int(groups.max()) + 1 if len(groups) else 0
    rows = torch.arange(len(groups), device=groups.device)
    ids = torch.cat([groups, count + keys[chosen]])
    return ids, torch.cat([rows, paths.rows.ids[chosen]])


def _against_mean(groups: Groups, values: Tensor) -> Tensor:
    """float64: values less their group's mean; exactly 0 where those are all equal."""
    centred = values.double() - groups.mean(values)[groups.member]
    return torch.where(groups.uniform(values)[groups.member], 0.0, centred)


def _weighted_mean(count: int, rows: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Mean by row, float64 [count], of values [E] with weights [E]; one with weight 0 is not read."""
    total = weights.new_zeros(count).index_add_(0, rows, weights)
    share = divide(weights, total[rows])
    parts = torch.where(weights > 0, share * values, 0.0)
    return parts.new_zeros(count).index_add_(0, rows, parts)


class _Nodes:
    """The distinct nodes of a batch's trees, numbered from 0; S segments are M nodes."""

    def __init__(self, batch: AdvantageBatch, paths: Paths, present: Tensor) -> None:
        groups = Groups.of(batch.groups).member
        keys = paths.keys(groups)
        unique, self.member = torch.unique(keys, return_inverse=True)  # [S]
        count = unique.numel()
        place = paths.rows.within()
        self._is_leaf = ~paths.inner()
        self._rows, self._present = paths.rows.ids, present
        previous = torch.roll(self.member, 1)  # of the segment before, where there is one
        self._before = torch.where(place > 0, previous, -1)  # [S]; -1: the prompt
        self.depth = keys.new_zeros(count).index_copy_(0, self.member, place)
        self._parent = keys.new_full((count,), -1).index_copy_(0, self.member, self._before)
        group = keys.new_zeros(count).index_copy_(0, self.member, groups[self._rows])
        # Nodes of one parent share a number; those of the prompt, their group's.
        self.siblings = torch.where(self._parent >= 0, self._parent, count + group)
        sizes = keys.new_zeros(count).index_add_(0, self.member, present[self._rows].long())
        self.counted = sizes > 0  # bool [M]; whether a sample with a reward goes through it

    def values(self, leaves: Tensor) -> Tensor:
        """V of each node, float64 [M], from that of each sample [N]; 0 where no reward is."""
        count = self.depth.numel()
        ends = self._is_leaf & self._present[self._rows]
        at = self.member[ends]
        total = leaves.new_zeros(count, dtype=torch.float64)
        number = torch.zeros_like(total)
        total.index_add_(0, at, leaves.double()[self._rows[ends]])
        number.index_add_(0, at, torch.ones_like(leaves, dtype=torch.float64)[self._rows[ends]])
        deepest = int(self.depth.max()) if count else 0
        for depth in range(deepest, 0, -1):  # a node's own value is known when its turn comes
            level = ((self.depth == depth) & self.counted).nonzero().squeeze(-1)
            parents = self._parent[level]
            total.index_add_(0, parents, divide(total[level], number[level]))
            number.index_add_(0, parents, torch.ones_like(total)[level])
        return divide(total, number)

    def before(self, values: Tensor) -> Tensor:
        """Of the node before each segment [S]: its number among [M]; 0 where that is the prompt."""
        return torch.where(self._before >= 0, values[self._before.clamp(min=0)], 0.0)


def _by_segment(
    batch: AdvantageBatch,
    paths: Paths,
    added: Tensor,
    present: Tensor,
    whiten: bool,
    prefix_weight: str,
) -> Advantages:
    """Advantages from a number for each segment [S]."""
    parts = torch.where(present[paths.rows.ids], added, 0.0)
    segment = paths.of_tokens(batch.rows)
    inside = batch.mask & (segment >= 0)
    per_token = batch.rewards.new_zeros(segment.numel())
    per_token[inside] = parts.to(batch.rewards.dtype)[segment[inside]]
    return _finished(batch, paths, per_token, whiten, prefix_weight)


def _finished(
    batch: AdvantageBatch, paths: Paths, advantages: Tensor, whiten: bool, prefix_weight: str
) -> Advantages:
    """Whitened over all tokens, and shared ones in one completion only, where that is asked for."""
    if whiten:
        tokens = batch.rows.kept(batch.mask)
        advantages = tokens.put(whitened_rows(tokens.take(advantages), tokens.rows, batch.moments))
    if prefix_weight == "per_leaf":
        return Advantages(advantages=advantages, returns=advantages)
    advantages, mask = _once(batch, paths, advantages)
    return Advantages(advantages=advantages, returns=advantages, mask=mask)


def _once(batch: AdvantageBatch, paths: Paths, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Mean advantages of shared tokens, and a mask that has each in the first row that has it [T]."""
    segment = paths.of_tokens(batch.rows)
    keys = paths.keys(Groups.of(batch.groups).member)
    place = torch.arange(segment.numel(), device=segment.device)
    inside = segment.clamp(min=0)
    offset = place - paths.starts(batch.rows)[inside]
    longest = int(paths.lengths.max()) + 1 if paths.lengths.numel() else 1
    shared = keys[inside] * longest + offset if keys.numel() else place
    # A token outside all segments is its own.
    tokens = Groups.of(torch.where(segment >= 0, shared, -1 - place), batch.mask)
    mean = tokens.mean(advantages)[tokens.member]
    first = torch.full_like(tokens.sizes, float("inf"))
    at = torch.where(batch.mask, place.double(), float("inf"))
    first = first.scatter_reduce_(0, tokens.member, at, "amin")
    mask = batch.mask & (first[tokens.member] == place)
    alone = tokens.sizes[tokens.member] == 1
    advantage = torch.where(alone, advantages.double(), mean).to(advantages.dtype)
    return torch.where(mask, advantage, 0.0), mask
