"""What settings are where a recipe does not name them: what suits the CPU, or the GPU."""

from pathlib import Path

import pytest
import yaml
from pydantic import JsonValue

import configs.recipe
from configs.environment import cpu_model, cpu_multiplies_bfloat16
from configs.grpo import GRPOConfig
from configs.model import RandomModel
from configs.recipe import find_recipe, load_recipe
from configs.resolving import Machine, resolve
from configs.rollout import RolloutConfig
from engines.rollout.contract import RolloutSpec
from engines.rollout.vllm_arguments import step_tokens

DEMO = "smollm2-arithmetic"
FAST, SLOW = Machine(multiplies_bfloat16=True), Machine(multiplies_bfloat16=False)


def on(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(configs.recipe, "this_machine", lambda: machine)


def formats(config: GRPOConfig) -> tuple[str, str]:
    return config.rollout.dtype, config.train.compute_dtype


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, SLOW)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, FAST)


@pytest.mark.usefixtures("fast")
def test_bfloat16_where_the_cpu_has_it() -> None:
    assert formats(load_recipe(GRPOConfig, DEMO)) == ("bfloat16", "bfloat16")


@pytest.mark.usefixtures("slow")
def test_float32_where_it_has_not() -> None:
    assert formats(load_recipe(GRPOConfig, DEMO)) == ("float32", "float32")
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


def settings(pool: dict[str, int], rollout: dict[str, object], engine: str = "vllm") -> GRPOConfig:
    """Those of `tiny` with another pool `rollout`, and of its sampling these alone; 16 x 8 samples."""
    raw = yaml.safe_load(find_recipe("tiny").read_text())
    raw["cluster"]["pools"]["rollout"] = pool
    raw["rollout"] = {"engine": engine, "dtype": "float32", "shards": 8, **rollout}
    read = GRPOConfig.model_validate({**raw, "prompts_per_step": 16, "group_size": 8})
    return resolve(read, FAST).settings


def test_vllm_decodes_more_sequences_where_it_has_gpus() -> None:
    gpu = {"gpus": 1}
    assert settings({}, {}).rollout.max_sequences == 64
    assert settings(gpu, {}).rollout.max_sequences == 512
    assert settings(gpu, {"max_sequences": 64}).rollout.max_sequences == 64
    assert settings(gpu, {}, "transformers").rollout.max_sequences == 64, "it holds each sequence"
    recorded = settings(gpu, {}).model_dump(mode="json")
    recorded["rollout"]["max_sequences"] = 64  # as earlier runs recorded it
    assert GRPOConfig.model_validate(recorded).rollout.max_sequences == 64


@pytest.mark.parametrize(
    ("pool", "rollout", "slots"),
    [
        ({}, {}, 2),  # on a CPU
        ({"gpus": 1}, {}, 9),  # eight shards, and one that would wait
        ({"gpus": 1, "workers": 2}, {}, 5),
        ({"gpus": 1, "workers": 3}, {}, 4),
        ({"gpus": 1, "slots": 3}, {}, 3),
        ({"gpus": 1}, {"max_sequences": 32}, 3),  # two shards of 16 samples are decoded at once
        ({"gpus": 1}, {"max_sequences": 8}, 2),
        ({"gpus": 1}, {"shards": 16, "over_sampling": 1.5}, 25),  # a shard is a group
    ],
)
def test_a_gpu_engine_has_slots_for_its_shards(
    pool: dict[str, int], rollout: dict[str, object], slots: int
) -> None:
    config = settings(pool, rollout)
    pools = config.cluster.pools
    assert (pools["rollout"].slots, pools["train"].slots) == (slots, 2)
    recorded = config.model_dump(mode="json")
    recorded["cluster"]["pools"]["rollout"]["slots"] = 2  # as earlier runs recorded it
    assert GRPOConfig.model_validate(recorded).cluster.pools["rollout"].slots == 2


def test_a_step_of_vllm_takes_more_tokens_on_a_gpu() -> None:
    def tokens(longest: int, sequences: int = 64, **further: JsonValue) -> int:
        rollout = RolloutConfig(max_sequences=sequences, engine_args=further)
        spec = RolloutSpec(
            model=RandomModel(), rollout=rollout, store_uri="memory://x", max_model_len=longest
        )
        return step_tokens(spec, on_cpu=False)

    assert tokens(2048) == 16384
    assert tokens(100_000) == 16384, "its prompt is read in parts"
    assert tokens(100_000, enable_chunked_prefill=False) == 100_000
    assert tokens(32) == 64 * 32, "there cannot be more"
    assert tokens(2048, sequences=20_000) == 20_000, "each sequence has one"


@pytest.mark.parametrize("first", [True, False])
def test_a_run_goes_on_in_its_format_on_another_machine(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    on(monkeypatch, Machine(multiplies_bfloat16=first))
    begun = load_recipe(GRPOConfig, DEMO)
    on(monkeypatch, Machine(multiplies_bfloat16=not first))
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


X86 = "processor : 0\nvendor_id : {}\ncpu family : {}\nmodel : {}\nmodel name : any\n\n"
ARM = "processor : 0\nCPU implementer : 0x41\nCPU architecture: 8\nCPU variant : 0x1\nCPU part : 0xd40\n"


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (X86.format("GenuineIntel", 6, 143) * 2, "GenuineIntel 6 143"),
        (X86.format("AuthenticAMD", 25, 17), "AuthenticAMD 25 17"),
        (ARM, "0x41 8 0x1 0xd40"),
        ("processor : 0\n", ""),
    ],
)
def test_maker_and_model_of_the_cpu(tmp_path: Path, text: str, model: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert cpu_model(file) == model


def test_nothing_is_assumed_of_a_machine_without_such_a_file(tmp_path: Path) -> None:
    assert cpu_multiplies_bfloat16(tmp_path / "none")
