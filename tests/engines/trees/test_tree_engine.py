"""Trees in the store: each node once, leaves as samples, the same trees however shards are cut."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.tree import TreeSettings
from engines.trees.contract import GrownTrees, Growth
from engines.trees.tree_engine import grow, repeats
from storage.batches.columns import SEGMENT, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

DEPTH, SEGMENT_TOKENS, N = 3, 4, 5


class Letters:
    """Decodes ids as letters."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + i % 26) for i in ids)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def prompts_in(store: Store, count: int = 3) -> BatchRef:
    return write_batch(
        store,
        "run/prompts.safetensors",
        {
            "prompt_ids": [[1, 2, group] for group in range(count)],
            "group_id": np.arange(count) + 7,
            "prompt_row": np.arange(count) * 2,
            "row": [{"question": group} for group in range(count)],
        },
    )


def experts_of(ids: list[int]) -> np.ndarray:
    """As if a token's only expert had the number of the token after it."""
    return np.array(ids, np.uint8).reshape(-1, 1, 1)


def sampled(store: Store, asked: BatchRef, version: int, key: str, ends: float) -> BatchRef:
    """What an engine would make of a level: tokens by group and branch seed, some paths ended."""
    begun = [ids.tolist() for ids in asked.fetch_list(store, "response_ids")]
    groups = asked.fetch_numpy(store, "group_id")[0].tolist()
    seeds = asked.fetch_numpy(store, "branch_seed")[0].tolist()
    logprobs = [each.tolist() for each in asked.fetch_list(store, "rollout_logprobs")]
    spans = [each.tolist() for each in asked.fetch_list(store, "weight_spans")]
    rows: dict[str, list[Any]] = {name: [] for name in ("ids", "logprobs", "spans", "why")}
    for group, seed, before, known, had in zip(groups, seeds, begun, logprobs, spans, strict=True):
        chance = random.Random(f"{group}/{seed}/{len(before)}")
        over = chance.random() < ends
        more = chance.randint(1, 3) if over else SEGMENT_TOKENS
        last = len(before) == (DEPTH - 1) * SEGMENT_TOKENS
        rows["ids"].append(before + [chance.randint(4, 90) for _ in range(more)])
        rows["logprobs"].append(known + [-chance.random() for _ in range(more)])
        rows["spans"].append([*had, version, len(before), len(before) + more])
        rows["why"].append("stop" if over else "length" if last else SEGMENT)
    count = len(groups)
    written = write_batch(
        store,
        key,
        {
            "response_ids": [np.array(ids, np.int32) for ids in rows["ids"]],
            "prompt_routed_experts": [np.full((2, 1, 1), 9, np.uint8)] * count,
            "routed_experts": [experts_of(ids) for ids in rows["ids"]],
            "rollout_logprobs": [np.array(each, np.float32) for each in rows["logprobs"]],
            "weight_spans": [np.array(each, np.int64) for each in rows["spans"]],
            "finish_reason": rows["why"],
            "weights_digest": [f"v{version}"] * count,
            "worker": [f"rollout-{version}"] * count,
            "attempt": np.full(count, version, np.int64),
        },
    )
    return asked[["prompt_ids", "group_id", "prompt_row"]].with_columns(written)


def whole(store: Store, prompts: BatchRef, name: str, ends: float = 0.3, **tree: Any) -> GrownTrees:
    """Trees of some prompts, level by level; the policy is version 3, then 4, then 5."""
    growth = Growth(tree=TreeSettings(depth=DEPTH, **tree), n=N, seed=1, step=2)
    found = grow(store, prompts, growth, f"run/{name}-0.safetensors", Letters())
    for number in itertools.count(1):
        if found.asked is None:
            return found
        level = sampled(store, found.asked, 2 + number, f"run/{name}-level-{number}", ends)
        found = grow(
            store,
            prompts,
            growth,
            f"run/{name}-{number}.safetensors",
            Letters(),
            before=found,
            level=level,
        )
    raise AssertionError("not reached")


def lists(store: Store, ref: BatchRef, name: str) -> list[Any]:
    rows = ref.fetch_list(store, name)
    return [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]


@pytest.mark.parametrize("fall_back", [True, False])
def test_leaves_are_the_concatenation_of_nodes_that_are_stored_once(store, fall_back):
    prompts = prompts_in(store)
    found = whole(store, prompts, "a", fall_back=fall_back)
    nodes, samples = found.nodes, found.samples
    assert nodes is not None and samples is not None
    assert lists(store, samples, "group_id") == [g for g in (7, 8, 9) for _ in range(N)]
    assert lists(store, samples, "sample_id") == [g * N + k for g in (7, 8, 9) for k in range(N)]
    places = list(
        zip(lists(store, nodes, "group_id"), lists(store, nodes, "tree_node"), strict=True)
    )
    assert len(set(places)) == len(places) == len(nodes)
    at = {place: row for row, place in enumerate(places)}
    parents = lists(store, nodes, "tree_parent")
    segment = {name: lists(store, nodes, name) for name in ("response_ids", "rollout_logprobs")}
    used = set()
    rows = zip(
        *(
            lists(store, samples, name)
            for name in (
                *("group_id", "tree_path", "tree_lengths", "response_ids"),
                *("rollout_logprobs", "worker", "attempt", "weights_digest", "finish_reason"),
            )
        ),
        strict=True,
    )
    for group, path, lengths, ids, logprobs, worker, attempt, digest, why in rows:
        own = [at[group, node] for node in path]
        used |= set(own)
        assert [parents[row] for row in own] == [0, *path[:-1]]
        assert ids == [token for row in own for token in segment["response_ids"][row]]
        assert logprobs == [one for row in own for one in segment["rollout_logprobs"][row]]
        assert lengths == [len(segment["response_ids"][row]) for row in own]
        assert worker == lists(store, nodes, "worker")[own[-1]]
        assert attempt == lists(store, nodes, "attempt")[own[-1]]
        assert digest == f"v{2 + attempt - 2}" and why in ("stop", "length")
    assert used == set(range(len(nodes))), "every node is part of a sample"
    tokens = sum(len(ids) for ids in segment["response_ids"])
    assert tokens < sum(len(ids) for ids in lists(store, samples, "response_ids"))
    if fall_back:
        pairs = list(
            zip(
                lists(store, samples, "group_id"),
                map(tuple, lists(store, samples, "tree_path")),
                strict=True,
            )
        )
        assert len(set(pairs)) == len(pairs)


def test_experts_of_a_leaf_are_those_of_its_segments_and_of_a_prompt_once(store):
    samples = whole(store, prompts_in(store), "t").samples
    assert samples is not None
    for ids, experts in zip(
        lists(store, samples, "response_ids"), lists(store, samples, "routed_experts"), strict=True
    ):
        assert experts == experts_of(ids).tolist()
    assert lists(store, samples, "prompt_routed_experts") == [[[[9]], [[9]]]] * len(samples)
    rows = samples.column("prompt_routed_experts").index.array().tolist()
    assert rows == [row - row % N for row in range(len(samples))]


def test_versions_of_a_leaf_are_those_of_its_segments(store):
    found = whole(store, prompts_in(store), "a", ends=0.0)
    assert found.samples is not None
    for spans in lists(store, found.samples, "weight_spans"):
        assert spans == [3, 0, 4, 4, 4, 8, 5, 8, 12]
    assert set(lists(store, found.samples, "status")) == {SampleStatus.TRUNCATED}
    assert found.truncated == 3 * N


def test_the_same_trees_however_the_prompts_are_cut_into_shards(store):
    prompts = prompts_in(store)
    together = whole(store, prompts, "a").samples
    alone = [whole(store, prompts.rows(k, k + 1), f"b{k}").samples for k in range(3)]
    assert together is not None
    joined = BatchRef.concat([one for one in alone if one is not None])
    for name in ("response_ids", "tree_path", "tree_lengths", "sample_id", "finish_reason"):
        assert lists(store, together, name) == lists(store, joined, name), name


def test_a_path_is_over_where_it_has_an_answer_or_repeats_itself(store):
    prompts = prompts_in(store)
    every = whole(store, prompts, "a", ends=0.0, stop={"answer": "."}).samples
    assert every is not None
    assert set(lists(store, every, "finish_reason")) == {"answer"}
    assert set(lists(store, every, "status")) == {SampleStatus.OK}
    assert {len(path) for path in lists(store, every, "tree_path")} == {1}
    none = whole(store, prompts, "b", ends=0.0, stop={"answer": "!"}).samples
    assert none is not None and set(lists(store, none, "finish_reason")) == {"length"}
    assert repeats([1, 5, 6, 5, 6, 5, 6], 2, 3) and not repeats([5, 6, 5, 6], 2, 3)
    assert repeats([9, 4, 4], 1, 2) and not repeats([9, 4, 3], 1, 2)
    repetition = {"repetition": {"tokens": 1, "times": 2}}
    some = whole(store, prompts, "c", ends=0.0, stop=repetition)
    assert some.samples is not None
    for ids, why, status in zip(
        lists(store, some.samples, "response_ids"),
        lists(store, some.samples, "finish_reason"),
        lists(store, some.samples, "status"),
        strict=True,
    ):
        if why == "repetition":
            assert ids[-1] == ids[-2] and status == SampleStatus.TRUNCATED
