"""Adapters for tree_advantages.json: TreePO's advantages of trees, and its siblings' form."""

from __future__ import annotations

import itertools

import torch

from configs.algorithm.advantages import TreeAdvantage, TreeSegmentAdvantage, TreeSiblingAdvantage
from configs.base import Method
from engines.algorithms.advantages import ADVANTAGES
from engines.algorithms.aggregation import Rows
from engines.algorithms.inputs import AdvantageBatch, Paths
from tests.parity.answers import Adapter, Answer, group_numbers
from tests.parity.vectors import Case


def batch_of(case: Case) -> AdvantageBatch:
    """Completions whose index is prompt#node#node…, each node of `segment_tokens` tokens.

    The reference cuts completions by number alone, so that a path may be over before its tokens are,
    and the other way round. `tree` does not look at the segments' lengths.
    """
    index, lengths = case.inputs["index"], case.inputs["lengths"]
    size = case.params.get("segment_tokens", 1)
    named = [list(itertools.accumulate(one.split("#"), "{}#{}".format)) for one in index]
    nodes = [path[1:] for path in named]
    cut = [
        [max(0, min(size, length - place * size)) for place in range(len(path))]
        for path, length in zip(nodes, lengths, strict=True)
    ]
    rows = Rows.of_lengths(torch.tensor(lengths))
    return AdvantageBatch(
        rows=rows,
        mask=torch.ones_like(rows.ids, dtype=torch.bool),
        rewards=case.tensor("rewards"),
        groups=group_numbers([path[0] for path in named]),
        paths=Paths(
            rows=Rows.of_lengths(torch.tensor([len(path) for path in nodes])),
            nodes=group_numbers([one for path in nodes for one in path]),
            lengths=torch.tensor([one for path in cut for one in path]),
        ),
    )


def estimated(batch: AdvantageBatch, choice: Method, whiten: bool) -> torch.Tensor:
    """Advantages [T] by the method of a recipe."""
    arguments = choice.arguments() | {"whiten": whiten}
    return ADVANTAGES[choice.model_dump()["kind"]](batch, **arguments).advantages


def tree_case(case: Case) -> Answer:
    choice = TreeAdvantage.model_validate(case.params)
    batch = batch_of(case)
    return {
        "pre_whiten": estimated(batch, choice, False)[batch.rows.offsets[:-1]],
        "advantages": estimated(batch, choice, True),
    }


def segment_case(case: Case) -> Answer:
    """The value of a leaf is what its segments add up to where nothing is discounted."""
    eta = case.params["eta"]
    choice = TreeSegmentAdvantage(discount=eta if eta > 0 else 1.0)
    batch = batch_of(case)
    whole = one_token_a_segment(batch)
    added = estimated(whole, TreeSegmentAdvantage(), False)
    return {
        "modified_reward": whole.rows.sum(added),
        "segment_advantage": estimated(whole, choice, False),
        "advantages": estimated(batch, choice, True),
    }


def one_token_a_segment(batch: AdvantageBatch) -> AdvantageBatch:
    """The same paths, whose advantages are then one for each segment."""
    assert batch.paths is not None
    rows, ones = batch.paths.rows, torch.ones_like(batch.paths.nodes)
    return AdvantageBatch(
        rows=rows,
        mask=ones.bool(),
        rewards=batch.rewards,
        groups=batch.groups,
        paths=Paths(rows=rows, nodes=batch.paths.nodes, lengths=ones),
    )


def sibling_case(case: Case) -> Answer:
    return {"advantages": estimated(batch_of(case), TreeSiblingAdvantage(), False)}


ADAPTERS: dict[str, Adapter] = {
    "tree": tree_case,
    "tree_segment": segment_case,
    "segpo_sibling_norm": sibling_case,
}
