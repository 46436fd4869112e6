"""Plans: balance against reference figures, and what must hold for every batch."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines.train.batching import packing
from engines.train.batching.mfu import CostModel
from engines.train.batching.packing import (
    Lengths,
    MiniBatch,
    plan_logprobs,
    plan_update,
)
from engines.train.batching.stored_plan import PlanRequest, read_plan, write_plan
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store

VECTORS = Path(__file__).parents[3] / "parity" / "vectors" / "seqlen_balancing.json"
CASES = json.loads(VECTORS.read_text())["cases"]


def of(function: str) -> list:
    return [
        pytest.param(case, id=case["name"])
        for case in CASES
        if case["function"] == function and case["outputs"] is not None
    ]


@pytest.mark.parametrize("case", of("rearrange_micro_batches"))
def test_micro_batches_reach_or_beat_the_reference(case: dict) -> None:
    lengths, params = case["inputs"]["seqlen_list"], case["params"]
    budget, wanted = params["max_token_len"], case["outputs"]
    (mini,) = plan_update(
        Lengths(prompts=np.ones_like(lengths), responses=np.asarray(lengths)),
        world=params.get("num_batches_divided_by", 1),
        budget=budget,
    )
    tokens = [sum(lengths[row] for row in micro) for rank in mini.ranks for micro in rank]
    assert max(tokens) <= budget
    assert len(tokens) <= wanted["num_micro_batches"]
    if len(tokens) == wanted["num_micro_batches"]:
        assert max(tokens) <= wanted["max_tokens"]


@st.composite
def batches(draw: st.DrawFn) -> Lengths:
    groups = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    prompts = [draw(st.integers(1, 30)) for _ in groups]
    ids = np.repeat(np.arange(len(groups)) + 100, groups)
    responses = [draw(st.integers(0, 40)) for _ in ids]
    return Lengths(prompts=np.repeat(prompts, groups), responses=np.asarray(responses), groups=ids)


def tokens_of(lengths: Lengths, rows: tuple[int, ...]) -> int:
    """Tokens of a micro-batch in which a prompt is there once for each group."""
    used = [row for row in rows if lengths.responses[row]]
    shared = {int(lengths.groups[row]): int(lengths.prompts[row]) for row in used}
    return sum(shared.values()) + sum(int(lengths.responses[row]) - 1 for row in used)


def check(lengths: Lengths, mini: MiniBatch, world: int, budget: int) -> None:
    assert len(mini.ranks) == world
    assert {len(rank) for rank in mini.ranks} == {len(mini.ranks[0])}
    for rank in mini.ranks:
        for micro in rank:
            assert list(micro) == sorted(micro)
            assert tokens_of(lengths, micro) <= budget


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 4), st.integers(70, 300), st.integers(1, 3))
def test_update_plans_cover_every_row_once(
    lengths: Lengths, world: int, budget: int, mini_batches: int
) -> None:
    mini_batches = min(mini_batches, len(lengths))
    plan = plan_update(lengths, world=world, budget=budget, mini_batches=mini_batches)
    assert len(plan) == mini_batches
    assert [row for mini in plan for row in mini.rows()] == list(range(len(lengths)))
    for mini in plan:
        check(lengths, mini, world, budget)
    alone = plan_update(lengths, world=1, budget=10_000, mini_batches=mini_batches)
    assert [mini.rows() for mini in plan] == [mini.rows() for mini in alone]


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 4), st.integers(70, 300))
def test_logprob_plans_give_ranks_contiguous_rows(
    lengths: Lengths, world: int, budget: int
) -> None:
    plan = plan_logprobs(lengths, world=world, budget=budget)
    check(lengths, plan, world, budget)
    in_rank_order = [row for rank in plan.ranks for row in sorted(r for m in rank for r in m)]
    assert in_rank_order == list(range(len(lengths)))


def test_groups_stay_together_when_that_costs_no_balance() -> None:
    groups = np.repeat(np.arange(8), 8)
    lengths = Lengths(prompts=np.full(64, 30), responses=np.full(64, 48), groups=groups)
    (mini,) = plan_update(lengths, world=2, budget=8192)
    for rank in mini.ranks:
        (micro,) = rank
        assert tokens_of(lengths, micro) == 4 * (30 + 8 * 47)


def test_a_group_too_large_for_the_budget_is_cut() -> None:
    lengths = Lengths(
        prompts=np.full(8, 30), responses=np.full(8, 48), groups=np.zeros(8, dtype=np.int64)
    )
    (mini,) = plan_update(lengths, world=1, budget=200)
    assert max(tokens_of(lengths, micro) for micro in mini.ranks[0]) <= 200
    assert len(mini.ranks[0]) == 3


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(70, 300), st.booleans())
@example(
    Lengths(prompts=np.full(3, 1), responses=np.array([32, 40, 32]), groups=np.zeros(3, np.int64)),
    70,
    False,
)
def test_on_one_rank_groups_are_cut_where_they_do_not_fit(
    lengths: Lengths, budget: int, large: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LARGE", 2 if large else 8192)
        (mini,) = plan_update(lengths, world=1, budget=budget)
        assert plan_logprobs(lengths, world=1, budget=budget) == mini
    check(lengths, mini, 1, budget)
    (micros,) = mini.ranks
    groups = [tuple(np.flatnonzero(lengths.groups == one)) for one in np.unique(lengths.groups)]
    whole = [tokens_of(lengths, group) for group in groups]
    pieces = [sum(bool(set(micro) & set(group)) for micro in micros) for group in groups]
    for group, size, cut in zip(groups, whole, pieces, strict=True):
        if size <= budget:
            assert cut == 1
        else:  # pieces that are no neighbours may be in one micro-batch
            assert 1 < cut <= _in_order(lengths, group, budget)
    if max(whole) <= budget:
        assert sum(tokens_of(lengths, micro) for micro in micros) == sum(whole)
        assert len(micros) <= 2 * sum(whole) / budget + 1, "two bins that fit into one"


def _in_order(lengths: Lengths, group: tuple[int, ...], budget: int) -> int:
    """Pieces of a group's rows in their order, each as long as it can be."""
    pieces: list[tuple[int, ...]] = [()]
    for row in group:
        longer = (*pieces[-1], row)
        if tokens_of(lengths, longer) <= budget:
            pieces[-1] = longer
        else:
            pieces.append((row,))
    return len(pieces)


def test_the_planner_of_older_runs_cuts_groups_for_balance_on_one_rank() -> None:
    lengths = Lengths(
        prompts=np.repeat([40, 20, 20], 4),
        responses=np.array([90, 10, 30, 20, 50, 60, 10, 80, 30, 20, 10, 40]),
        groups=np.repeat(np.arange(3), 4),
    )
    (whole,) = plan_update(lengths, world=1, budget=330)
    (cut,) = plan_update(lengths, world=1, budget=330, lone_rank="balanced")
    formerly = ((4, 5, 6, 7, 10, 11), (0, 1, 2, 3, 8, 9))  # as the code of f941b39 makes it
    assert cut.ranks == (formerly,)
    assert whole.ranks == (((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7)),)
    both = [sum(tokens_of(lengths, micro) for micro in plan.ranks[0]) for plan in (whole, cut)]
    assert both[0] < both[1]
    assert plan_logprobs(lengths, world=1, budget=330) == whole
    rows = plan_logprobs(lengths, world=1, budget=330, lone_rank="balanced")
    assert sorted(rows.ranks[0]) == sorted(formerly)


def test_balance_counts_attention() -> None:
    lengths = Lengths(prompts=np.ones(3, int), responses=np.array([1000, 500, 500]))
    even = plan_update(lengths, world=2, budget=4000)[0]
    assert sorted(map(len, (rank[0] for rank in even.ranks))) == [1, 2]
    squares = plan_update(lengths, world=2, budget=4000, cost=CostModel(per_square=1.0))[0]
    assert sorted(rank[0] for rank in squares.ranks) == [(0,), (1, 2)]


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        (Lengths(prompts=np.array([5, 50]), responses=np.array([5, 60])), "Row 1 has 109 tokens"),
        (Lengths(prompts=np.array([0]), responses=np.array([3])), "Row 0 has an empty prompt"),
        (Lengths(prompts=np.zeros(0, int), responses=np.zeros(0, int)), "no rows"),
    ],
)
def test_refusals_name_the_row(lengths: Lengths, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_update(lengths, world=1, budget=100)
    with pytest.raises(ValueError, match=says):
        plan_logprobs(lengths, world=1, budget=100)


def test_a_batch_with_fewer_rows_than_mini_batches_has_as_many_as_rows() -> None:
    lengths = Lengths(prompts=np.array([3, 3]), responses=np.array([3, 4]))
    plan = plan_update(lengths, world=4, budget=100, mini_batches=3)
    assert [sorted(r for rank in mini.ranks for unit in rank for r in unit) for mini in plan] == [
        [0],
        [1],
    ]
    for mini in plan:  # ranks without a row have a part too, so that all of them go along
        assert {len(rank) for rank in mini.ranks} == {1}


def test_large_plans_keep_what_must_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    lengths = Lengths(
        prompts=np.repeat(random.integers(5, 30, 75), 4),
        responses=np.where(random.random(300) < 0.05, 0, random.integers(1, 200, 300)),
        groups=np.repeat(np.arange(75), 4),
    )
    monkeypatch.setattr(packing, "LARGE", 40)
    plan = plan_update(lengths, world=3, budget=600, mini_batches=2)
    assert sorted(row for mini in plan for row in mini.rows()) == list(range(300))
    assert [len({len(rank) for rank in mini.ranks}) for mini in plan] == [1, 1]
    forward = plan_logprobs(lengths, world=3, budget=600)
    assert [row for rank in forward.ranks for row in sorted(sum(rank, ()))] == list(range(300))
    assert len({len(rank) for rank in forward.ranks}) == 1
    for mini in (*plan, forward):
        for micro in (micro for rank in mini.ranks for micro in rank):
            shared = {int(lengths.groups[row]) for row in micro if lengths.responses[row]}
            prompts = sum(int(lengths.prompts[group * 4]) for group in shared)
            rows = [int(lengths.responses[row]) - 1 for row in micro if lengths.responses[row]]
            assert prompts + sum(rows) <= 600
    needed = sum(lengths.responses) / 600
    assert sum(len(rank) for mini in plan for rank in mini.ranks) < 1.5 * needed


def test_a_stored_plan_is_the_plan(tmp_path: Path) -> None:
    store, random = Store(str(tmp_path)), np.random.default_rng(2)
    sizes = random.integers(1, 50, 7)
    ids = Jagged(np.ones(int(sizes.sum()), np.int32), np.concatenate([[0], sizes.cumsum()]))
    batch = write_batch(
        store,
        "batch.safetensors",
        {"prompt_ids": [[1, 2]] * 7, "response_ids": ids, "group_id": np.arange(7) // 2},
    )
    limits = {"world": 2, "budget": 60, "mini_batches": 2, "cost": CostModel()}
    stored = write_plan(store, PlanRequest(batch=batch, **limits), "plan.safetensors")
    assert read_plan(store, stored) == plan_update(packing.read_lengths(store, batch), **limits)
