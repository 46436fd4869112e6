"""What a rank says it holds in the middle of a pass, where an out-of-memory error is raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.algorithm.algorithm import AlgorithmConfig
from configs.train import TrainConfig
from engines.train.contract import LogprobRequest, UpdateRequest
from engines.train.fsdp_engine import FSDPEngine
from engines.train.memory_plan import MemoryPlan, largest_batch, plan_rank
from engines.train.model.fsdp import layers
from tests.engines.train.conftest import Make
from tests.engines.train.test_memory_plan import (
    GROUP,
    PROMPT,
    RESPONSE,
    ROWS,
    longest_rows,
    shape_of,
)
from tests.engines.train.train_ranks import TEMPERATURE

SETTINGS: dict[str, Any] = {"compute_dtype": "bfloat16", "micro_batch_tokens": 140}


def seen_within(engine: FSDPEngine) -> list[dict[str, int]]:
    """What `memory_held` says whenever a layer's forward, or its backward pass, has been made."""
    seen: list[dict[str, int]] = []

    def look(*_: object) -> None:
        seen.append(engine.memory_held("host"))

    for layer in layers(engine._loaded()):
        layer.self_attn.register_forward_hook(look)
        layer.self_attn.register_full_backward_hook(look)
    return seen


def plan(role: str) -> MemoryPlan:
    train = TrainConfig(**SETTINGS)
    batch = largest_batch(train.micro_batch_tokens, PROMPT, RESPONSE, ROWS, GROUP, 1)
    assert batch.several
    return plan_rank(shape_of(), train, batch, role=role, ranks=1, on_gpu=False)


@pytest.mark.parametrize("reshard", ["auto", True])
def test_in_an_update_it_is_what_the_plan_says(
    make: Make, tmp_path: Path, reshard: bool | str
) -> None:
    engine = make(**SETTINGS, reshard_after_forward=reshard)
    seen = seen_within(engine)
    engine.update(
        UpdateRequest(
            step=1,
            batch=longest_rows(tmp_path),
            algorithm=AlgorithmConfig(),
            temperature=TEMPERATURE,
            max_new_tokens=RESPONSE,
        )
    )
    planned = plan("actor")
    micros = len(seen) // 4  # two layers, forward and backward
    assert micros > 1
    for held in seen:
        assert held["weights"] == planned.held["weights"]
        assert held["optimizer"] == planned.held["optimizer"]
    for held in seen[4:]:  # once a micro-batch is done, all gradients are there
        assert held["gradients"] == planned.passing["gradients"]
    assert engine.memory_held("host")["gradients"] == 0  # after the optimizer step


def test_a_frozen_models_weights_are_known_too(make: Make, tmp_path: Path) -> None:
    engine = make(**SETTINGS, role="ref")
    seen = seen_within(engine)
    engine.logprobs(
        LogprobRequest(
            batch=longest_rows(tmp_path),
            column="ref_logprobs",
            out_key="run/ref.safetensors",
            temperature=TEMPERATURE,
        )
    )
    assert seen
    assert {held["weights"] for held in seen} == {plan("ref").held["weights"]}
    engine.leave()
    assert engine.memory_held("host")["weights"] == 0
