"""A vLLM's share of a GPU: what it has room for, and when it could not start."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from configs.lora import LoraConfig
from configs.rollout import RolloutConfig
from engines.models.facts import ModelShape
from engines.rollout.memory_plan import (
    ADAPTER_RANKS,
    UNPLANNED,
    VllmShare,
    engine_bytes,
    vllm_share,
)
from tests.tasks.memory.settings import GPU, SHAPES, plan, settings, words

TRAINS = (
    "train.optimizer_device=host",
    "train.gradient_checkpointing=1",
    "train.activation_offload=true",
    "train.reshard_after_forward=true",
)
SHARE = "rollout.gpu_memory_utilization"


def refused(*given: str) -> str:
    with pytest.raises(ValueError, match="^By the memory plan [^\n]*$") as caught:
        plan(settings(*given))
    return str(caught.value)


def shape(size: str) -> ModelShape:
    hidden, layers, intermediate, heads, keys, vocabulary = SHAPES[size]
    return ModelShape(
        hidden=hidden,
        layers=layers,
        intermediate=intermediate,
        heads=heads,
        kv_heads=keys,
        head_size=hidden // heads,
        vocabulary=vocabulary,
        tied=False,
    )


def test_the_share_less_the_weights_is_for_keys_and_values() -> None:
    rollout = RolloutConfig(dtype="bfloat16", gpu_memory_utilization=0.5)
    share = vllm_share(rollout, shape("7b"), longest=1537, gpu=80 * 2**30)
    # 28 layers, keys and values, of 4 heads of 128 numbers of 2 bytes; blocks of 16 tokens.
    assert share.token == 28 * 2 * 4 * 128 * 2
    assert share.longest == 1552
    assert share.keys_and_values == 40 * 2**30 - share.weights
    assert share.samples == share.keys_and_values // share.token // 1552
    half = vllm_share(
        rollout.model_copy(update={"tensor_parallel_size": 2}), shape("7b"), 1537, 80 * 2**30
    )
    assert (half.weights, half.token) == (share.weights // 2, share.token // 2)
    eight = rollout.model_copy(update={"tensor_parallel_size": 8})  # more GPUs than key heads
    assert vllm_share(eight, shape("7b"), 1537, 80 * 2**30).token == share.token // 4


def test_an_adapter_beside_its_base_takes_tables_of_vllms_next_rank() -> None:
    rollout = RolloutConfig(dtype="bfloat16", gpu_memory_utilization=0.5)
    lora = LoraConfig(rank=20, target_modules=("q_proj", "down_proj"))
    without = vllm_share(rollout, shape("7b"), 1537, 80 * 2**30)
    share = vllm_share(rollout, shape("7b"), 1537, 80 * 2**30, lora)
    # A [32, in] and B [out, 32] of two layers in each of 28, 2 bytes a number.
    tables = 28 * 32 * (3584 + 3584 + 18944 + 3584) * 2
    assert share.weights - without.weights == tables
    held = engine_bytes(RolloutConfig(engine="transformers"), shape("7b"), 1, 16, lora)
    assert held["weights"] > engine_bytes(RolloutConfig(), shape("7b"), 1, 16)["weights"]


@pytest.mark.vllm
def test_the_ranks_of_tables_are_vllms() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == ADAPTER_RANKS


def test_the_least_share_holds_one_longest_sample_and_a_byte_less_none() -> None:
    share = VllmShare(whole=1000, weights=900, token=2, longest=50)
    assert (share.samples, share.least) == (1, 1000)
    assert replace(share, whole=999).samples == 0
    assert replace(share, whole=100).keys_and_values == 0


def test_the_plan_says_what_vllm_has_room_for(tmp_path: Path) -> None:
    lines = plan(settings(*words(tmp_path, "7b", *TRAINS)))
    (line,) = (line for line in lines if line.startswith("rollout, each engine: "))
    assert line == (
        "rollout, each engine: 0.85 of the GPU, of it weights 14.2 GiB, keys and values 53.5 GiB: "
        "1,001,297 tokens, 651 samples of 1,536 tokens"
    )


def test_a_share_without_room_is_refused_with_the_smallest_that_has_it(tmp_path: Path) -> None:
    given = words(tmp_path, "7b", *TRAINS)
    said = refused(*given, f"{SHARE}=0.1")
    assert f"vLLM has 8.0 GiB of a GPU of pool rollout ({SHARE} = 0.1)" in said
    assert "weights take 14.2 GiB" in said
    assert "at least one sample of 1536 tokens, 84 MiB" in said
    assert said.endswith(f"Set {SHARE} to 0.18 or more.")
    plan(settings(*given, f"{SHARE}=0.18"))
    refused(*given, f"{SHARE}=0.17")


def test_where_no_share_is_enough_the_engine_gets_more_gpus(tmp_path: Path) -> None:
    given = words(tmp_path, "70b", *TRAINS, "cluster.pools.train.workers=12")
    said = refused(*given)
    found = re.search(r"Set (.*)\.$", said)
    assert found is not None
    proposed = found.group(1).split()
    assert proposed[:2] == ["rollout.tensor_parallel_size=2", "cluster.pools.rollout.gpus=2"]
    plan(settings(*given, *proposed))


def test_a_pool_that_also_trains_has_no_engine_of_several_gpus(tmp_path: Path) -> None:
    turns = ("cluster.roles.rollout=train", "cluster.share_devices=true")
    said = refused(*words(tmp_path, "70b", *TRAINS, *turns, "cluster.pools.train.workers=12"))
    assert said.endswith(
        "Set cluster.roles.rollout to a pool of its own, where an engine may have several GPUs."
    )


def test_vllm_beside_a_trainer_gets_what_that_leaves(tmp_path: Path) -> None:
    beside = ("cluster.roles.rollout=train", "cluster.pools.train.gpu_memory_gib=141")
    given = words(tmp_path, "7b", *TRAINS, *beside)
    said = refused(*given, f"{SHARE}=0.9")
    assert "most of it for vLLM" in said
    found = re.search(rf"Set {SHARE} to ([\d.]+) or less\.$", said)
    assert found is not None
    plan(settings(*given, f"{SHARE}={found.group(1)}"))
    refused(*given, f"{SHARE}={float(found.group(1)) + 0.01:g}")
    none = (*beside[:1], "cluster.pools.train.gpu_memory_gib=75")  # of which 64.7 are the trainer's
    said = refused(*words(tmp_path, "7b", *TRAINS, *none), f"{SHARE}=0.9")
    assert said.endswith(
        "Set cluster.roles.rollout to a pool of its own, or cluster.share_devices=true."
    )
    small = ("cluster.pools.train.gpu_memory_gib=76", f"{SHARE}=0.1")  # of which 11 are left
    said = refused(*words(tmp_path, "7b", *TRAINS, beside[0], *small))
    assert "weights take 14.2 GiB" in said
    assert "Set cluster.roles.rollout to a pool of its own" in said


def test_an_evaluations_longer_sequences_need_room(tmp_path: Path) -> None:
    given = words(tmp_path, "7b", *TRAINS, f"{SHARE}=0.18")
    plan(settings(*given))
    suite = (
        "evaluation.suites={long: {source: {kind: file, path: rows.jsonl}, max_new_tokens: 32000}}"
    )
    assert "one sample of 32512 tokens" in refused(*given, suite)


def test_an_opponents_engines_need_room_too(tmp_path: Path) -> None:
    game = "{environment: {kind: class, path: 'games.py:Game'}, players: 2, opponent: {}}"
    played = (f"episodes={game}", "rewards.functions=[{kind: environment}]")
    apart = (
        "cluster.roles.opponent=frozen",
        "cluster.pools.frozen={workers: 1, threads: 1, gpus: 1, gpu_memory_gib: 12}",
    )
    said = refused(*words(tmp_path, "7b", *TRAINS, *played, *apart))
    assert "opponent's vLLM has 10.2 GiB of a GPU of pool frozen" in said


def test_a_judge_needs_room_too(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.md"
    rubric.write_text("Rate {completion}.")
    given = words(tmp_path, "7b", *TRAINS)
    judge = f"{{kind: local_judge, model: '{tmp_path / '7b'}', rubric: '{rubric}'"
    pool = f"cluster.pools.models={{workers: 1, threads: 1, gpus: 1, gpu_memory_gib: {GPU}}}"
    where = (pool, "cluster.roles.reward_model=models")

    def functions(share: float) -> str:
        return f"rewards.functions=[{judge}, gpu_memory_utilization: {share}}}]"

    said = refused(*given, *where, functions(0.1))
    assert "judge's vLLM has 8.0 GiB of a GPU of pool models" in said
    assert "rewards.functions[].gpu_memory_utilization of judge = 0.1" in said
    assert said.endswith("Set rewards.functions[].gpu_memory_utilization of judge to 0.19 or more.")
    plan(settings(*given, *where, functions(0.19)))


@pytest.mark.parametrize("name", UNPLANNED)
def test_what_vllm_does_otherwise_by_its_own_arguments_is_not_judged(
    tmp_path: Path, name: str
) -> None:
    given = words(tmp_path, "7b", *TRAINS, f"{SHARE}=0.1")
    lines = plan(settings(*given, f"rollout.engine_args={{{name}: 1}}"))
    assert "rollout, each engine: 0.1 of the GPU; what it has room for is not known" in lines
