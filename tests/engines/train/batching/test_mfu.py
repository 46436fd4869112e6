from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from engines.train.batching.mfu import CostModel, cost_model, peak_flops


@pytest.mark.parametrize(
    ("device", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("a device of the future", None),
    ],
)
def test_a_device_is_known_by_its_name(device: str, rate: float | None) -> None:
    assert peak_flops(device) == rate


def test_frozen_weights_take_no_gradient_of_their_own() -> None:
    costs = {"per_token": 4.0, "per_response_token": 2.0, "per_square": 1.0}
    work = (10, 3, 5)
    assert CostModel(**costs).forward(*work) == 51
    assert CostModel(**costs).backward(*work) == 102
    assert CostModel(**costs, frozen=0.75).backward(*work) == 102 - 0.75 * 40 - 6


@pytest.mark.parametrize(
    ("heads", "size"), [(4, 8), (4, 16), (2, 8)], ids=["as wide", "wider", "narrower"]
)
def test_attention_is_counted_of_the_heads_that_there_are(heads: int, size: int) -> None:
    """Beside torch's own count, which is of whole attention: causal is half of it."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=size,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config)

    def batched_products(tokens: int) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.arange(tokens)[None])
        return int(counter.get_flop_counts()["Global"][torch.ops.aten.bmm])

    # Rotary angles are such products too, in proportion to the length.
    squared = (batched_products(24) - 2 * batched_products(12)) / (24**2 - 2 * 12**2)
    head = model.get_output_embeddings()
    cost = cost_model(SimpleNamespace(model=model, head=head, parameters=model.parameters))
    assert 2 * cost.of_heads.per_square == squared
    assert cost.per_square == 2 * 32 * 3, "plans of old runs weigh as they did"
