"""Triton kernels for CUDA, each beside the plain code that it stands for.

The plain code is the reference, and the CPU's way. No kernel adds with atomics, and none is tuned by
timing, so sums come in one order and `train.deterministic` holds. Modules with kernels are not
imported on a CPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Stands for -inf: a word of such a logit has probability 0, and 0 times what a gradient makes of it
# is 0. With the least number there is, a gradient of 4 to an entropy made inf, and 0 x inf is NaN.
LEAST_LOGIT = -1e18

_WANTED = [True]  # of this process; a run's settings are the same for all of its roles


def use(allowed: bool) -> None:
    """Let kernels work in this process, or not (`train.kernels`)."""
    _WANTED[0] = allowed


def available(tensor: Tensor) -> bool:
    """Whether kernels can, and are to, work on a tensor: on CUDA, with Triton."""
    return _WANTED[0] and tensor.is_cuda and find_spec("triton") is not None
