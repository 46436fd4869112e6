"""The KL coefficient that follows the measured KL. No torch: the flow process decides with it."""

from __future__ import annotations


def adapted_coefficient(
    coefficient: float, kl: float, *, target: float, horizon: int, samples: int
) -> float:
    """The next KL coefficient: c (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon).

    Ziegler et al. 2019, arXiv:1909.08593. kl and target in nats; horizon in samples.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)
