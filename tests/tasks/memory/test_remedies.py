"""The settings that the memory plan proposes, and what fits with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.tasks.memory.settings import plan, settings, words

SAME = (
    *("reshard_after_forward", "gradient_checkpointing", "optimizer_device"),
    *("weights_dtype", "activation_offload"),
)
# A 7B model on one device that holds 80 GB, which trainer and vLLM have in turn.
ONE_DEVICE = (
    "cluster.roles.rollout=train",
    "cluster.share_devices=true",
    "train.optimizer_device=host",
    "train.gradient_checkpointing=1",
    "train.reshard_after_forward=true",
)
# A 70B model on sixteen of them: twelve ranks, and one engine on four.
SIXTEEN_DEVICES = (
    "cluster.pools.train.workers=12",
    "cluster.pools.rollout.gpus=4",
    "rollout.tensor_parallel_size=4",
    "train.optimizer_device=host",
    "train.gradient_checkpointing=1",
    "train.activation_offload=true",
)


def refused(*given: str) -> tuple[str, list[str]]:
    """What is said of a run that does not fit, and the settings that it proposes."""
    with pytest.raises(ValueError, match="^By the memory plan [^\n]*$") as caught:
        plan(settings(*given))
    found = re.search(r"Set ([^:]*): then it is", str(caught.value))
    return str(caught.value), [] if found is None else found.group(1).split()


def of_gpu(lines: list[str]) -> tuple[float, float]:
    """GiB planned of a GPU of the pool train, and what it has."""
    (line,) = (line for line in lines if line.startswith("a GPU of pool train: "))
    planned, has = re.findall(r"([\d.]+) GiB", line)
    return float(planned), float(has)


def test_a_7b_model_fits_one_device_of_80_gb(tmp_path: Path) -> None:
    planned, has = of_gpu(plan(settings(*words(tmp_path, "7b", *ONE_DEVICE))))
    assert planned == pytest.approx(67.7, abs=0.5)  # as docs/memory.md says
    assert planned < 0.9 * has  # with room for what the plan does not count


def test_rounded_weights_leave_room_on_the_device(tmp_path: Path) -> None:
    given = words(tmp_path, "7b", *ONE_DEVICE, "train.weights_dtype=bfloat16")
    (line,) = (line for line in plan(settings(*given)) if line.startswith("actor, "))
    assert "holds weights 14.2 GiB;" in line
    assert "backward 49.5 GiB" in line  # as docs/memory.md says
    assert line.endswith("on the host optimizer 56.7 GiB, master weights 28.4 GiB")


def test_a_70b_model_fits_sixteen_devices_of_80_gb(tmp_path: Path) -> None:
    lines = plan(settings(*words(tmp_path, "70b", *SIXTEEN_DEVICES)))
    planned, has = of_gpu(lines)
    assert planned == pytest.approx(59.3, abs=0.5)  # as docs/memory.md says
    assert planned < 0.9 * has
    (engine,) = (line for line in lines if line.startswith("rollout, each engine: 0.85 of each"))
    rounded = plan(
        settings(*words(tmp_path, "70b", *SIXTEEN_DEVICES, "train.weights_dtype=bfloat16"))
    )
    assert of_gpu(rounded)[0] == pytest.approx(48.4, abs=0.5)
    assert "of 4 GPUs, of it weights 32.9 GiB, keys and values 34.8 GiB" in engine


MIXTURES = {  # as their makers' config.json have them, but for what sizes do not follow from
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
    },
}
EIGHT = ("cluster.pools.train.workers=8", "train.gradient_checkpointing=1")
SPREAD = ("train.expert_parallel=8", "train.weights_dtype=bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more", "gib"),
    [
        ("qwen3_moe", (), 67.4),
        ("qwen3_moe", SPREAD, 58.1),
        ("qwen3_moe", ("lora.rank=32", "lora.target_parameters=all-experts"), 26.3),
        ("gpt_oss", (), 52.0),
        ("gpt_oss", SPREAD, 44.2),
    ],
)
def test_mixtures_of_20_and_30b_fit_eight_devices_of_80_gb(
    kind: str, more: tuple[str, ...], gib: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | MIXTURES[kind]))
    given = words(tmp_path, "7b", *EIGHT, "rollout.engine=transformers", *more)
    given[0] = f"model={{kind: pretrained, path: '{tmp_path}'}}"
    planned, has = of_gpu(plan(settings(*given)))
    assert planned == pytest.approx(gib, abs=0.5)  # as docs/memory.md says
    assert planned < 0.9 * has


@pytest.mark.parametrize("size", ["7b", "70b"])
def test_settings_that_keep_the_bits_are_proposed_first(tmp_path: Path, size: str) -> None:
    given = words(tmp_path, size, *(SIXTEEN_DEVICES[:3] if size == "70b" else ()))
    _, proposed = refused(*given)
    assert proposed
    assert {word.partition("=")[0] for word in proposed} <= {f"train.{name}" for name in SAME}
    plan(settings(*given, *proposed))


def test_one_setting_is_proposed_where_it_is_enough(tmp_path: Path) -> None:
    tight = ("train.optimizer_device=host", "train.gradient_checkpointing=1")
    tight = (*tight, "cluster.pools.train.gpu_memory_gib=75")
    said, proposed = refused(*words(tmp_path, "7b", *tight))
    assert proposed == ["train.reshard_after_forward=true"]
    assert "has to hold 77.9 GiB" in said
    assert said.endswith("Set train.reshard_after_forward=true: then it is 67.0 GiB.")


def test_other_settings_follow_those_that_keep_the_bits(tmp_path: Path) -> None:
    limit = "cluster.pools.train.gpu_memory_gib"
    all_same = ("train.activation_offload=true", "train.weights_dtype=bfloat16")
    one = words(tmp_path, "7b", *ONE_DEVICE[2:], *all_same)
    _, proposed = refused(*one, f"{limit}=46")
    assert proposed == ["train.micro_batch_tokens=8192"]
    plain = ("train.micro_batch_tokens=1536", "train.kernels=false")
    _, proposed = refused(*one, *plain, f"{limit}=45")
    assert proposed == ["train.logit_chunk_tokens=256"]


def test_ranks_can_share_sequences_that_are_too_long_for_one(tmp_path: Path) -> None:
    long = ("rollout.max_new_tokens=65536", "train.micro_batch_tokens=66048")
    ranks = ("cluster.pools.train.workers=8", "cluster.pools.train.gpu_memory_gib=20")
    given = words(tmp_path, "7b", *ONE_DEVICE[2:4], *long, *ranks, "train.activation_offload=true")
    _, proposed = refused(*given)
    assert proposed == ["train.sequence_parallel=2", "train.micro_batch_tokens=33024"]
    plan(settings(*given, *proposed))


def test_what_needs_more_ranks_could_be_an_adapter(tmp_path: Path) -> None:
    given = words(tmp_path, "7b", "cluster.pools.train.gpu_memory_gib=40")
    said, proposed = refused(*given)
    assert "cluster.pools.train.workers=2" in proposed
    plan(settings(*given, *proposed))
    found = re.search(r"Or train an adapter, (lora.rank=32[^:]*): then it is", said)
    assert found is not None
    plan(settings(*given, *found.group(1).split()))


def test_nothing_is_proposed_that_fills_the_host_instead(tmp_path: Path) -> None:
    _, proposed = refused(*words(tmp_path, "7b"))
    assert "train.optimizer_device=host" in proposed  # which takes 56.7 GiB there
    given = words(tmp_path, "7b", "cluster.pools.train.memory_gib=40")
    _, others = refused(*given)
    assert others != proposed
    plan(settings(*given, *others))
