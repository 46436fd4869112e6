"""Runs whose models need GPUs, of which nothing is loaded: only config.json is there."""

from __future__ import annotations

import json
from pathlib import Path

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from tasks.memory.check import check_memory
from tasks.run.features import features_of

SHAPES = {  # of Qwen2.5-7B and Llama-3.1-70B: width, layers, MLP width, heads, key heads, words
    "7b": (3584, 28, 18944, 28, 4, 152_064),
    "70b": (8192, 80, 28672, 64, 8, 128_256),
}
KINDS = {"7b": "qwen2", "70b": "llama"}
GPU = 79.6  # GiB that nvidia-smi says of an H100 with 80 GB


def words(folder: Path, size: str, *more: str) -> list[str]:
    """Settings of a run of such a model, with a pool of GPUs for each role."""
    directory = folder / size
    directory.mkdir(exist_ok=True)
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    names = (*names, "num_key_value_heads", "vocab_size")
    config = dict(zip(names, SHAPES[size], strict=True)) | {"model_type": KINDS[size]}
    (directory / "config.json").write_text(json.dumps(config))
    return [
        f"model={{kind: pretrained, path: '{directory}'}}",
        "train.compute_dtype=bfloat16",
        "train.micro_batch_tokens=16384",
        "rollout.engine=vllm",
        "rollout.dtype=bfloat16",
        "rollout.max_new_tokens=1024",
        "data.max_prompt_tokens=512",
        "prompts_per_step=64",
        "cluster.kind=address",
        "cluster.address=tcp://scheduler:8786",
        "store.uri=file:///shared",
        *(f"cluster.pools.{pool}.gpus=1" for pool in ("train", "rollout")),
        *(f"cluster.pools.{pool}.gpu_memory_gib={GPU}" for pool in ("train", "rollout")),
        *more,
    ]


def settings(*given: str) -> GRPOConfig:
    """Of a run of `tiny` but for these words."""
    return load_recipe(GRPOConfig, "tiny", list(given))


def plan(config: GRPOConfig) -> list[str]:
    """The lines of a run's memory plan, with what its features add."""
    found = check_memory(config, tuple(one.holders for one in features_of(config)))
    return [one.line for one in found]
