"""The KL coefficient that follows the measured KL.

A file of its own, short as it is, because the flow process decides with it and is free of torch,
which every other file here imports.
"""

from __future__ import annotations

ERROR_BOUND = 0.2  # on the relative distance from the target


def adapted_coefficient(
    coefficient: float, kl: float, *, target: float, horizon: int, samples: int
) -> float:
    """The next KL coefficient: c (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon).

    Ziegler et al. 2019, arXiv:1909.08593.

    Args:
        coefficient: c of the step before.
        kl: measured in that step, mean over tokens or rows, in nats.
        target: the KL aimed at, in nats.
        horizon: time scale in samples; after that many at the error bound c has changed by a fifth.
        samples: samples of the step.
    """
    error = min(max(kl / target - 1, -ERROR_BOUND), ERROR_BOUND)
    return coefficient * (1 + error * samples / horizon)
