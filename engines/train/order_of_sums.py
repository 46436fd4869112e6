"""Whether sums come out the same to the bit when they are made again: what is set for it, and said.

On a CPU they do: each model of CPU adds in one order. MKL and oneDNN choose their kernels by maker
and model: of two with AVX-512, an Intel and an AMD one, bits differ. On a GPU the backward passes of
attention and of lookups add with atomics, in the order in which blocks of threads happen to end.
torch has slower kernels with a fixed order, for attention too (aten's _flash_attention_backward asks
the same switch).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from configs.environment import cpu_model
from configs.train import TrainConfig
from engines.train.spec import MadeOn


def prepare(train: TrainConfig) -> None:
    """Before the process's first product on a GPU: cuBLAS reads its settings then.

    Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def in_fixed_order(wanted: bool) -> Iterator[None]:
    """Within it torch uses kernels with a fixed order of sums, and raises where it has none."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    switches: Any = torch.utils.deterministic  # a module whose switch is a property
    filled = switches.fill_uninitialized_memory
    switches.fill_uninitialized_memory = False  # nothing here reads such memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        switches.fill_uninitialized_memory = filled


def made_on(train: TrainConfig, device: torch.device) -> MadeOn:
    """What an update is made on."""
    gpu = device.type == "cuda"
    cpu = filter(None, (torch.backends.cpu.get_cpu_capability(), cpu_model()))
    return MadeOn(
        device=torch.cuda.get_device_name(device) if gpu else f"CPU ({', '.join(cpu)})",
        torch=str(torch.__version__),  # its own class would bring torch into the flow process
        fixed=not train.compile and (train.deterministic or not gpu),
    )
