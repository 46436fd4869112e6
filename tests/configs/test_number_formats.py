"""What settings are where a recipe does not name them: what suits the CPU, or the GPU."""

from pathlib import Path

import pytest

import configs.grpo
from configs.environment import cpu_multiplies_bfloat16
from configs.grpo import GRPOConfig
from configs.ppo import PPOConfig
from configs.recipe import load_recipe

DEMO = "smollm2-arithmetic"


def formats(config: GRPOConfig) -> tuple[str, str]:
    return config.rollout.dtype, config.train.compute_dtype


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs.grpo, "cpu_multiplies_bfloat16", lambda: False)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs.grpo, "cpu_multiplies_bfloat16", lambda: True)


@pytest.mark.usefixtures("fast")
def test_bfloat16_where_the_cpu_has_it() -> None:
    assert formats(load_recipe(GRPOConfig, DEMO)) == ("bfloat16", "bfloat16")


@pytest.mark.usefixtures("slow")
def test_float32_where_it_has_not() -> None:
    assert formats(load_recipe(GRPOConfig, DEMO)) == ("float32", "float32")
    ppo = load_recipe(PPOConfig, DEMO)
    assert formats(ppo) == ("float32", "float32")
    assert ppo.train_of("critic").compute_dtype == "float32"
    named = ["rollout.dtype=bfloat16", "train.compute_dtype=bfloat16"]
    assert formats(load_recipe(GRPOConfig, DEMO, named)) == ("bfloat16", "bfloat16")
    held = load_recipe(GRPOConfig, DEMO, ["train.weights_dtype=bfloat16"])
    assert formats(held) == ("float32", "bfloat16")


@pytest.mark.usefixtures("slow")
def test_gpus_are_no_cpu() -> None:
    rollout = load_recipe(GRPOConfig, DEMO, ["cluster.pools.rollout.gpus=1"])
    assert formats(rollout) == ("bfloat16", "float32")
    train = load_recipe(GRPOConfig, DEMO, ["cluster.pools.train.gpus=1"])
    assert formats(train) == ("float32", "bfloat16")


def test_vllm_is_compiled_where_it_has_gpus() -> None:
    gpu = "cluster.pools.rollout.gpus=1"
    assert load_recipe(GRPOConfig, DEMO).rollout.enforce_eager
    assert not load_recipe(GRPOConfig, DEMO, [gpu]).rollout.enforce_eager
    assert load_recipe(GRPOConfig, DEMO, [gpu, "rollout.enforce_eager=true"]).rollout.enforce_eager


@pytest.mark.parametrize("first", [True, False])
def test_a_run_goes_on_in_its_format_on_another_machine(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    monkeypatch.setattr(configs.grpo, "cpu_multiplies_bfloat16", lambda: first)
    begun = load_recipe(GRPOConfig, DEMO)
    monkeypatch.setattr(configs.grpo, "cpu_multiplies_bfloat16", lambda: not first)
    assert formats(GRPOConfig.model_validate(begun.model_dump(mode="json"))) == formats(begun)


@pytest.mark.parametrize(
    ("line", "there"),
    [
        ("flags\t\t: fpu avx avx2 avx512f avx512bw avx512vl", True),
        ("flags\t\t: fpu avx avx2 fma", False),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("Features\t: fp asimd", False),
        ("model name\t: of a machine that says nothing of instructions", True),
    ],
)
def test_what_the_kernel_says_of_the_cpu(tmp_path: Path, line: str, there: bool) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{line}\nbugs\t\t: none\n")
    assert cpu_multiplies_bfloat16(file) is there


def test_nothing_is_assumed_of_a_machine_without_such_a_file(tmp_path: Path) -> None:
    assert cpu_multiplies_bfloat16(tmp_path / "none")
