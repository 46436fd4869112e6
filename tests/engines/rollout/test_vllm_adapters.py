"""What vLLM holds of an adapter is compared number by number; here its layers are told by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from configs.lora import LoraConfig
from engines.failures import WeightMismatch
from engines.rollout.vllm_adapters import check_held
from engines.rollout.vllm_arguments import adapter_arguments

RANK, WIDTH, HEIGHTS = 2, 6, (4, 3)
Q, K, OUT = "layers.0.q_proj", "layers.0.k_proj", "layers.0.o_proj"


@dataclass
class Layer:
    """A layer with one slot for adapters of rank 8, of one or several tables."""

    heights: tuple[int, ...]
    tp_size: int = 1
    lora_a_stacked: list[Tensor] = field(default_factory=list)
    lora_b_stacked: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lora_a_stacked = [torch.zeros(1, 1, 8, WIDTH) for _ in self.heights]
        self.lora_b_stacked = [torch.zeros(1, 1, height, 8) for height in self.heights]


class Manager:
    """Of a model with a fused layer of two and a plain one; it holds what it was given."""

    def __init__(self, factors: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.lora_index_to_id = [1]
        self.modules = {"layers.0.qk_proj": Layer(HEIGHTS), OUT: Layer((5,))}
        self.packed_modules = {"layers.0.qk_proj": [Q, K]}
        for path, layer in self.modules.items():
            for place, name in enumerate(self.packed_modules.get(path, [path])):
                if name in factors:
                    a, b = factors[name]
                    layer.lora_a_stacked[place][0, 0, : len(a)] = a
                    layer.lora_b_stacked[place][0, 0, :, : b.shape[1]] = b


def factors() -> dict[str, tuple[Tensor, Tensor]]:
    noise = torch.Generator().manual_seed(0)
    return {
        name: (
            torch.randn(RANK, WIDTH, generator=noise),
            torch.randn(height, RANK, generator=noise),
        )
        for name, height in zip((Q, K, OUT), (*HEIGHTS, 5), strict=True)
    }


def check(manager: Manager, wanted: dict[str, tuple[Tensor, Tensor]]) -> None:
    check_held(cast(Any, manager), wanted)


def test_all_that_is_held_is_that_of_the_adapter() -> None:
    whole = factors()
    check(Manager(whole), whole)
    del whole[K]
    check(Manager(whole), whole)  # the other half of a fused layer is zero then


@pytest.mark.parametrize("name", [Q, K, OUT])
@pytest.mark.parametrize("which", [0, 1])
def test_one_other_number_is_seen(name: str, which: int) -> None:
    held, wanted = factors(), factors()
    held[name][which][1, 1] += 1e-6
    with pytest.raises(WeightMismatch, match=r"layers\.0\..* Set lora\.serving = merged"):
        check(Manager(held), wanted)


def test_what_is_left_of_an_adapter_before_is_seen() -> None:
    wanted = factors()
    manager = Manager(wanted)
    manager.modules[OUT].lora_b_stacked[0][0, 0, 0, 7] = 1.0  # beyond the rank
    with pytest.raises(WeightMismatch, match="o_proj"):
        check(manager, wanted)
    del wanted[K]
    with pytest.raises(WeightMismatch, match="qk_proj"):
        check(Manager(factors()), wanted)


def test_a_factor_without_a_place_is_seen() -> None:
    wanted = factors()
    manager = Manager(wanted)
    del manager.modules[OUT]
    with pytest.raises(WeightMismatch, match="o_proj"):
        check(manager, wanted)
    manager = Manager(wanted)
    manager.packed_modules = {}
    with pytest.raises(WeightMismatch, match="qk_proj"):
        check(manager, wanted)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (3, 8), (33, 64), (512, 512)])
def test_vllm_has_room_for_one_adapter_of_the_runs_rank(rank: int, room: int) -> None:
    shapes = {
        "model.embed_tokens.weight": (101, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.0.mlp.down_proj.weight": (64, 128),
        "lm_head.weight": (101, 64),
    }
    found = adapter_arguments(LoraConfig(rank=rank), shapes)
    assert (found["max_lora_rank"], found["max_loras"]) == (room, 1)
    assert found["lora_target_modules"] == ["down_proj", "q_proj"]
    found = adapter_arguments(LoraConfig(target_modules=("v_proj",)), shapes)
    assert found["lora_target_modules"] == ["v_proj"]
