"""Reward models, and judges that the run starts itself, in the memory plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.model import RandomModel
from configs.rewards import RewardModelReward
from engines.models.checkpoints import materialize
from engines.reward_models.model import RewardModel
from tasks.reward_models.memory import reward_model_bytes
from tests.engines.reward_models.drawn import draw_reward_model
from tests.tasks.memory.settings import plan
from tests.tasks.memory.test_check import MIB, refused, settings


def test_judges_of_the_runs_own_are_in_the_plan(tmp_path: Path) -> None:
    drawn = materialize(RandomModel(), tmp_path / "judge")
    rubric = tmp_path / "rubric.md"
    rubric.write_text("Rate {completion}.")
    judge = f"kind: local_judge, model: '{drawn}', rubric: '{rubric}', max_length: 2048"

    def words(*judges: str, pool: str = "workers: 1") -> list[str]:
        functions = ", ".join(f"{{{judge}, {more}}}" for more in judges)
        return [
            f"rewards.functions=[{functions}]",
            "cluster.roles.reward_model=models",
            f"cluster.pools.models={{{pool}, threads: 1}}",
        ]

    *_, line, _ = plan(settings(*words("engine: transformers, dtype: float32")))
    # 64 answers of 2,048 tokens at once, of two layers with two heads of 32 numbers, twice.
    assert line.endswith(f"judge's keys and values {64 * 2048 * 2 * 2 * 2 * 32 * 4 // MIB} MiB")
    *_, line, machine = plan(settings(*words("kv_cache_gib: 1.5")))
    assert line.endswith("judge's keys and values 1.5 GiB")
    assert machine.startswith("this machine: 1.5 GiB")  # all others are a few MiB

    on_gpu = "workers: 1, gpus: 1, gpu_memory_gib: 80"
    far = ("cluster.kind=address", "cluster.address=tcp://s:8786", "store.uri=file:///shared")
    *_, line, gpu = plan(settings(*words("votes: 1", pool=on_gpu), *far))
    assert line.startswith(
        "judge, each engine: 0.85 of the GPU, of it weights 0 MiB, keys and values"
    )
    assert gpu == "a GPU of pool models: 68.0 GiB of 80.0 GiB (cluster.pools.models.gpu_memory_gib)"
    said = refused(*words("name: one", "name: two", pool=on_gpu), *far)
    assert "a GPU of pool models has to hold 136.0 GiB, and has 80.0 GiB" in said
    assert "gpu_memory_utilization, lower" in said


def test_reward_models_are_in_the_plan(tmp_path: Path) -> None:
    drawn = draw_reward_model(tmp_path)
    words = (
        f"rewards.functions=[{{kind: math}}, {{kind: reward_model, model: '{drawn}'}}]",
        "cluster.roles.reward_model=models",
        "cluster.pools.models={workers: 1, threads: 1}",
    )
    *_, line, _ = plan(settings(*words))
    assert line.startswith("reward_model, each worker: reward models' weights ")
    config = settings(*words)
    planned = reward_model_bytes(config)["reward models' weights"]
    (reward,) = (one for one in config.rewards.functions if isinstance(one, RewardModelReward))
    assert planned == pytest.approx(RewardModel(reward, tmp_path).held, rel=0.01)

    far = ("cluster.kind=address", "cluster.address=tcp://s:8786", "store.uri=file:///shared")
    small = "cluster.pools.models={workers: 1, threads: 1, memory_gib: 0.5}"
    many = "rewards.functions.1.batch_tokens=4000000"
    plan(settings(*words, small, *far))
    said = refused(*words, many, "prompts_per_step=4096", small, *far)
    assert "a worker of pool models" in said
    assert "Set batch_tokens of the reward model (rewards.functions[]) lower" in said
