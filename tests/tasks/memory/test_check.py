"""The memory plan before a run: what it says, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from tasks.memory import check, holders
from tasks.memory.holders import gpu_memory, host_memory
from tests.tasks.memory.settings import plan

MIB = 2**20
LARGE = (  # a model that needs GPUs, of which nothing is loaded
    "model={kind: random, layers: 32, hidden_size: 4096, heads: 64, max_positions: 8192}",
    "train.compute_dtype=bfloat16",
    "train.micro_batch_tokens=16384",
    "data.max_prompt_tokens=512",
    "rollout.max_new_tokens=1024",
    "prompts_per_step=128",
    "cluster.pools.train.gpus=1",
    "cluster.pools.train.workers=8",
    "cluster.kind=address",
    "cluster.address=tcp://scheduler:8786",
    "store.uri=file:///shared",
)


def settings(*words: str, model: type[GRPOConfig] = GRPOConfig) -> GRPOConfig:
    return load_recipe(model, "tiny", list(words))


def refused(*words: str) -> str:
    with pytest.raises(ValueError, match="By the memory plan") as caught:
        plan(settings(*words))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_plan_names_what_each_role_takes_and_what_there_is() -> None:
    actor, reference, rollout, machine = plan(
        settings("algorithm.kl.coefficient=0.1", "cluster.pools.train.workers=2")
    )
    assert re.match(r"actor, each of 2 ranks: holds weights .* MiB, optimizer .*; in an", actor)
    assert "activations" in actor
    assert "backward" in actor
    assert reference.startswith("ref, each of 2 ranks: holds weights")
    assert "optimizer" not in reference
    assert rollout.startswith("rollout, each engine: weights")
    assert machine.startswith("this machine: ")


def test_what_cannot_fit_is_refused_with_a_setting_that_makes_it_fit() -> None:
    said = refused(*LARGE, "cluster.pools.train.gpu_memory_gib=40")
    assert said.startswith("By the memory plan a GPU of pool train has to hold ")
    assert "and has 40.0 GiB (cluster.pools.train.gpu_memory_gib); most of it for actor's " in said
    found = re.search(r"Set (.*): then it is", said)
    assert found is not None
    words = found.group(1).split()
    assert words
    plan(settings(*LARGE, "cluster.pools.train.gpu_memory_gib=40", *words))


def test_a_model_too_large_for_its_ranks_gets_more_of_them() -> None:
    said = refused(*LARGE, "cluster.pools.train.gpu_memory_gib=4")
    assert "cluster.pools.train.workers=" in said


def test_two_roles_on_a_gpu_share_it() -> None:
    pool = "cluster.pools.train.gpu_memory_gib=200"
    alone = plan(settings(*LARGE, pool))
    both = plan(settings(*LARGE, pool, "algorithm.kl.coefficient=0.1"))

    def planned(lines: list[str]) -> float:
        (line,) = (line for line in lines if line.startswith("a GPU of pool train"))
        return float(re.search(r": ([\d.]+) GiB", line).group(1))  # type: ignore[union-attr]

    assert planned(alone) < planned(both) < 1.5 * planned(alone)


def test_the_machine_is_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "host_memory", lambda: (8 * MIB, "its memory"))
    said = refused("rollout.max_new_tokens=64")
    assert said.startswith("By the memory plan this machine has to hold ")


def test_a_container_has_what_its_group_may_use(tmp_path: Path) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:       1024 kB\nMemFree:         12 kB\n")
    group.write_text("max\n")
    assert host_memory(meminfo, (group,)) == (2**20, "its memory")
    group.write_text(f"{2**19}\n")
    assert host_memory(meminfo, (group,)) == (2**19, str(group))
    group.write_text(f"{2**30}\n")
    assert host_memory(meminfo, (group, tmp_path / "none")) == (2**20, "its memory")


def test_a_model_whose_sizes_are_not_known_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "sizes_of", lambda *given: None)
    (line,) = plan(settings())
    assert line.startswith("no plan")


def test_gpus_are_asked_for_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 143771\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert gpu_memory() == 81559 * MIB


def test_roles_that_share_a_gpu_are_counted_one_at_a_time() -> None:
    shared = (
        *LARGE,
        "cluster.roles.rollout=train",
        "rollout.engine=vllm",
        "cluster.pools.train.gpu_memory_gib=141",
        "algorithm.kl.coefficient=0.1",
    )
    assert "to hold" in refused(*shared)
    lines = plan(settings(*shared, "cluster.share_devices=true"))
    (gpu,) = (line for line in lines if line.startswith("a GPU of pool train"))
    assert "of 141.0 GiB" in gpu


def test_an_opponents_engines_are_counted_where_they_are() -> None:
    game = "{environment: {kind: class, path: 'games.py:Game'}, players: 2, opponent: {}}"
    played = (f"episodes={game}", "rewards.functions=[{kind: environment}]")
    lines = plan(settings(*played))
    assert [line for line in lines if line.startswith("opponent, each engine: weights")]
    gpu = (*LARGE, "cluster.pools.rollout.gpus=1", "rollout.engine=vllm", "rollout.dtype=bfloat16")
    gpu = (*gpu, "rollout.gpu_memory_utilization=0.6", "cluster.pools.rollout.gpu_memory_gib=80")
    gpu = (*gpu, "cluster.pools.train.gpu_memory_gib=800")
    assert plan(settings(*gpu))
    said = refused(*gpu, *played)
    assert "a GPU of pool rollout has to hold 96.0 GiB" in said
    assert (
        "Set rollout.gpu_memory_utilization to 0.5 or less, or cluster.roles.opponent to a" in said
    )


def test_an_adapter_is_planned_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(check, "sizes_of", lambda *given: asked.append(given))
    plan(settings("lora.rank=4"))
    ((*_, lora),) = asked
    assert lora is not None


def test_what_a_transfer_of_weights_holds_is_counted() -> None:
    words = ("rollout.weight_transfer=nccl",)
    actor, rollout, _ = plan(settings(*words))
    assert "weight transfer" in actor
    # Two pieces of 64 MiB, 256 MiB that are not hashed yet, and the largest tensor.
    found = re.search(r"weight transfer ([\d.]+) MiB", rollout)
    assert found is not None
    assert 384 <= float(found.group(1)) < 400
    assert not any("weight transfer" in line for line in plan(settings()))
