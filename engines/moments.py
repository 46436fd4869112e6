"""Variance and whitening of the tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.jagged import divide


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values under mask 1 (scalar); 0 without any."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def masked_variance(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of values under mask 1 (scalar), over n - 1 or n; 0 for fewer than two values."""
    count = mask.sum()
    centred = torch.where(mask, values - masked_mean(values, mask), 0.0)
    return centred.square().sum() / (count - int(unbiased)).clamp(min=1)


def whitened(
    values: Tensor, mask: Tensor | None = None, *, shift: bool = True, epsilon: float = 1e-8
) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon), divisor n - 1: [T] -> [T]; no mask: of all values.

    shift = false adds the mean again. What stands under mask 0 is transformed too.
    """
    if mask is None:
        mean = values.mean() if values.numel() else values.new_zeros(())
        variance = values.var() if values.numel() > 1 else values.new_zeros(())
    else:
        mean, variance = masked_mean(values, mask), masked_variance(values, mask)
    scale = divide(torch.ones_like(variance), (variance + epsilon).sqrt())
    scaled = (values - mean).mul_(scale)
    return scaled if shift else scaled + mean
