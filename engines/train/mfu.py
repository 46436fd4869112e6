"""Peak floating-point rates of GPUs, by which model FLOPs utilisation (MFU) is measured.

Dense bfloat16 products with float32 sums, without sparsity, as the makers' data sheets state them.
"""

from __future__ import annotations

import re

# FLOP/s. The first name that stands in the device's name counts, so longer names come first.
PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "MI300X": 1307e12,
    "RTX 4090": 165e12,
}


def peak_flops(device: str) -> float | None:
    """FLOP/s of a device by its name, such as `NVIDIA H100 80GB HBM3`; None where it is not known."""
    for name, rate in PEAKS.items():
        if re.search(rf"\b{re.escape(name)}\b", device):
            return rate
    return None
