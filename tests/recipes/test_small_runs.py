"""Each recipe makes two steps with a random model: its own algorithm, rewards and environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.conftest import Launch
from tests.recipes.stand_ins import flow, of_hub, recipe, rows

MODEL = "{kind: random, layers: 2, hidden_size: 64, heads: 2, max_positions: 4096}"
SMALL = (  # in place of what is for large models on GPUs
    "steps=2",
    "prompts_per_step=2",
    "group_size=2",
    f"model={MODEL}",
    "data.max_prompt_tokens=2048",
    "rollout.engine=transformers",
    "rollout.max_new_tokens=1500",
    "rollout.dtype=float32",
    "rollout.shards=2",
    "rollout.probe_tolerance=0.001",
    "train.compute_dtype=float32",
    "train.weights_dtype=float32",
    "train.micro_batch_tokens=8192",
    "train.mini_batches=1",
)


def words(name: str, folder: Path) -> list[str]:
    """Settings by which a recipe's run is small enough for a CPU."""
    settings = recipe(name)
    found = [name, *SMALL, *rows(name, folder)]
    for pool in settings["cluster"]["pools"]:
        found.append(f"cluster.pools.{pool}={{workers: 1, threads: 1, slots: 3}}")
    if "episodes" in settings:
        found += ["episodes.max_turn_tokens=6", "episodes.full_turn=counts", "episodes.processes=1"]
    else:
        found.append("rollout.max_new_tokens=16")
    if "lora" in settings:
        found.append("lora.rank=2")
    if "overlong" in settings.get("algorithm", {}).get("shaping", {}):
        found.append("algorithm.shaping.overlong.buffer=4")
    if flow(name) == "dapo":
        found.append("dynamic_sampling.max_rounds=2")
    found += [f"teachers.{teacher}.model={MODEL}" for teacher in settings.get("teachers", {})]
    return found


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in of_hub() if one != "gsm8k-multinode"])
def test_two_steps(name: str, launch: Launch, tmp_path: Path) -> None:
    run = launch(*words(name, tmp_path), module=f"flows.{flow(name)}").whole()
    commits = run.commits()
    assert [commit.step for commit in commits] == [1, 2]
    samples = commits[-1].refs["samples"]
    if name == "alphabet-sort":
        assert samples.fetch_list(run.files.store, "episode") == ["done"] * 4
        assert commits[-1].metrics["episode/turns_mean"] == 3
    for reward in recipe(name)["rewards"]["functions"]:
        label = reward.get("path", reward["kind"]).rpartition(":")[2]
        scores = samples.fetch_numpy(run.files.store, f"score/{label}")[0]
        assert ((scores >= 0) & (scores <= 1)).all(), label
