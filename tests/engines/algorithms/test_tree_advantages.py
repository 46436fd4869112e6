"""Advantages over subtrees. The reference's own numbers are in tests/parity."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.algorithm.advantages import (
    DrGRPOAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    TreeAdvantage,
    TreeSegmentAdvantage,
    TreeSiblingAdvantage,
)
from configs.base import Method
from engines.algorithms.advantages import ADVANTAGES
from engines.algorithms.aggregation import Rows
from engines.algorithms.inputs import AdvantageBatch, Advantages, Paths
from tests.engines.algorithms.batches import advantage_batch

EXAMPLES = settings(max_examples=30, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**31 - 1)


def estimated(batch: AdvantageBatch, choice: Method) -> Advantages:
    return ADVANTAGES[choice.model_dump()["kind"]](batch, **choice.arguments())


def grown(seed: int, leaves: int, prompts: int = 2) -> AdvantageBatch:
    """Trees of so many leaves each, drawn at random; some leaves share all of their segments."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    paths: list[list[int]] = []
    lengths: list[list[int]] = []
    groups = []
    for group in range(prompts):
        sizes = [0]  # tokens of each node; the prompt is node 0
        pending = [([0], leaves)]
        while pending:
            path, share = pending.pop()
            if len(path) > 1 and (share == 1 or number(0, 4) == 0):
                paths += [path[1:]] * share
                lengths += [[sizes[node] for node in path[1:]]] * share
                groups += [group] * share
                continue
            left = share
            while left:
                take = number(1, left)
                sizes.append(number(1, 4))
                pending.append(([*path, len(sizes) - 1], take))
                left -= take
    rows = Rows.of_lengths(torch.tensor([sum(each) for each in lengths]))
    return AdvantageBatch(
        rows=rows,
        mask=torch.ones_like(rows.ids, dtype=torch.bool),
        rewards=torch.randint(0, 3, (len(paths),), generator=generator).double(),
        groups=torch.tensor(groups),
        paths=Paths(
            rows=Rows.of_lengths(torch.tensor([len(path) for path in paths])),
            nodes=torch.tensor([node for path in paths for node in path]),
            lengths=torch.tensor([size for each in lengths for size in each]),
        ),
    )


def tokens_of(batch: AdvantageBatch) -> list[tuple[int, int, int]]:
    """Which token each is: prompt, node, place in the node. Copies in other rows are equal."""
    assert batch.paths is not None
    found = []
    nodes, sizes = batch.paths.nodes.tolist(), batch.paths.lengths.tolist()
    for row, (start, stop) in enumerate(pairwise(batch.paths.rows.offsets.tolist())):
        for node, size in zip(nodes[start:stop], sizes[start:stop], strict=True):
            found += [(int(batch.groups[row]), node, place) for place in range(size)]
    return found


@EXAMPLES
@given(seed=SEEDS, weight=st.sampled_from(["group_size", "average"]), drop=st.booleans())
def test_a_flat_tree_is_the_group_baseline_to_the_bit(seed, weight, drop):
    batch = advantage_batch(seed)
    flat = dataclasses.replace(batch, paths=Paths.flat(batch.rows))
    choice = TreeAdvantage(weight=weight, drop_equal_subgroups=drop, whiten=False)
    expected = estimated(batch, DrGRPOAdvantage()).advantages
    assert torch.equal(estimated(flat, choice).advantages, expected)
    assert torch.equal(estimated(batch, choice).advantages, expected)
    whitened = estimated(flat, choice.model_copy(update={"whiten": True})).advantages
    baseline = estimated(batch, ReinforcePlusPlusBaselineAdvantage()).advantages
    torch.testing.assert_close(whitened, baseline, rtol=1e-9, atol=1e-9)


@EXAMPLES
@given(seed=SEEDS, leaves=st.integers(2, 8))
def test_it_is_the_mean_over_the_subtrees_one_by_one(seed, leaves):
    batch = grown(seed, leaves)
    assert batch.paths is not None
    edges = batch.paths.rows.offsets.tolist()
    paths = [batch.paths.nodes[a:b].tolist() for a, b in pairwise(edges)]
    got = estimated(batch, TreeAdvantage(whiten=False)).advantages
    for row, path in enumerate(paths):
        group = [i for i in range(len(paths)) if batch.groups[i] == batch.groups[row]]
        subtrees = [group] + [
            members
            for node in path[:-1]
            if len(members := [i for i in group if node in paths[i]]) > 1
        ]
        parts = [float(batch.rewards[row] - batch.rewards[each].mean()) for each in subtrees]
        sizes = [len(each) for each in subtrees]
        wanted = sum(a * n for a, n in zip(parts, sizes, strict=True)) / sum(sizes)
        first = int(batch.rows.offsets[row])
        assert float(got[first]) == pytest.approx(wanted, abs=1e-12)


@EXAMPLES
@given(seed=SEEDS)
def test_prompt_std_divides_by_the_deviation_of_the_groups_rewards(seed):
    batch = grown(seed, 4)
    plain = estimated(batch, TreeAdvantage(whiten=False)).advantages
    scaled = estimated(batch, TreeAdvantage(whiten=False, scale="prompt_std", epsilon=0.5))
    for group in (0, 1):
        own = (batch.groups == group)[batch.rows.ids]
        deviation = batch.rewards[batch.groups == group].std() + 0.5
        torch.testing.assert_close(scaled.advantages[own], plain[own] / deviation)


def test_segments_add_up_to_the_leafs_value_where_nothing_is_discounted():
    batch = grown(5, 6)
    assert batch.paths is not None
    one_each = dataclasses.replace(
        batch,
        rows=batch.paths.rows,
        mask=torch.ones_like(batch.paths.nodes, dtype=torch.bool),
        paths=dataclasses.replace(batch.paths, lengths=torch.ones_like(batch.paths.nodes)),
    )
    raw = estimated(one_each, TreeSegmentAdvantage(whiten=False)).advantages
    half = estimated(one_each, TreeSegmentAdvantage(whiten=False, discount=0.5)).advantages
    first = batch.paths.rows.offsets[:-1]
    assert torch.equal(raw[first], half[first])  # nothing stands before the first segment
    assert not torch.equal(raw, half)


@pytest.mark.parametrize(
    "choice",
    [TreeAdvantage(), TreeSegmentAdvantage(), TreeSiblingAdvantage()],
    ids=lambda choice: choice.kind,
)
@EXAMPLES
@given(seed=SEEDS, hidden=st.integers(0, 5))
def test_once_has_the_gradient_of_the_distinct_nodes(choice, seed, hidden):
    """Sum over distinct tokens of the mean advantage of those that have it, by its definition."""
    batch = grown(seed, 6)
    batch = dataclasses.replace(batch, mask=batch.rows.ids != hidden)  # a completion cut off
    every = estimated(batch, choice).advantages
    once = estimated(batch, choice.model_copy(update={"prefix_weight": "once"}))
    assert once.mask is not None and not bool((once.mask & ~batch.mask).any())
    names = tokens_of(batch)
    shared: dict[tuple[int, int, int], list[float]] = {}
    for name, value, counts in zip(names, every.tolist(), batch.mask.tolist(), strict=True):
        if counts:
            shared.setdefault(name, []).append(value)
    trained = {
        name: value
        for name, value, kept in zip(
            names, once.advantages.tolist(), once.mask.tolist(), strict=True
        )
        if kept
    }
    assert int(once.mask.sum()) == len(trained) == len(shared)  # each distinct token in one row
    for name, values in shared.items():
        assert trained[name] == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert gradient(batch, once.advantages, once.mask, names) == pytest.approx(
        {name: sum(values) / len(values) for name, values in shared.items()}, abs=1e-6
    )


def gradient(
    batch: AdvantageBatch, advantages: Tensor, mask: Tensor, names: list[tuple[int, int, int]]
) -> dict[tuple[int, int, int], float]:
    """Derivative of sum(advantage x log-prob) by the log-prob of each distinct token."""
    order = list(dict.fromkeys(names))
    logprobs = torch.zeros(len(order), dtype=torch.float64, requires_grad=True)
    copies = logprobs[torch.tensor([order.index(name) for name in names])]
    torch.where(mask, copies * advantages, 0.0).sum().backward()
    assert logprobs.grad is not None
    seen = {name for name, counts in zip(names, batch.mask.tolist(), strict=True) if counts}
    return {n: float(g) for n, g in zip(order, logprobs.grad, strict=True) if n in seen}


def test_a_completion_without_a_reward_is_as_if_it_were_not_there():
    batch = grown(7, 5, prompts=1)
    missing = batch.rewards.clone()
    missing[1] = float("nan")
    for choice in (TreeAdvantage(), TreeSegmentAdvantage(), TreeSiblingAdvantage()):
        got = estimated(dataclasses.replace(batch, rewards=missing), choice).advantages
        changed = missing.clone()
        changed[0] += 1.0
        other = estimated(dataclasses.replace(batch, rewards=changed), choice).advantages
        assert torch.isfinite(got).all() and not torch.equal(got, other)
