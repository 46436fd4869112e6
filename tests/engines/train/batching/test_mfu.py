from __future__ import annotations

import pytest

from engines.train.batching.mfu import CostModel, peak_flops


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
