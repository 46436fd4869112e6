"""The decoder's layers compiled by torch: some graphs for all layers and all sizes of micro-batch.

What is compiled is a layer's forward pass and not its call, so FSDP's hooks and the checkpoint of its
activations stay outside, and weights keep their names. Sizes are symbols, and layers of one shape
share graphs. On a GPU a layer is one graph: attention's kernel is one operation in it. On a CPU
attention stays as it is, since its buckets are others in each micro-batch, and a layer is four
graphs, before, around and after it.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.environment import compilers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKEND = "inductor"
# Graphs of one piece of code before torch goes back to uncompiled layers. There are as many as
# layers of different kinds, times: with gradients, without, frozen, each with adapters and without.
LIMIT = 64
OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # with which torch compiles nothing


def lacking(gpu: bool) -> str | None:
    """What compiling needs and this machine lacks, with the remedy; None: nothing.

    gpu: whether for a GPU, which Triton compiles for, or for the CPU.
    """
    for variable in OFF:
        if os.environ.get(variable) == "1":
            return f"{variable}=1 keeps torch from it. Unset {variable}"
    if gpu and find_spec("triton") is None:
        return "triton is not installed. Install it: pip install triton"
    names = compilers(gpu)
    if not any(map(shutil.which, names)):
        compiler = f"{'C' if gpu else 'C++'} compiler ({' or '.join(names)})"
        return f"there is no {compiler} here. Install one (apt install g++)"
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if not headers.exists():
        return f"Python's headers are not there ({headers}). Install them (apt install python3-dev)"
    return None


def check_compiling(role: str, gpu: bool) -> None:
    """Raise ValueError in a sentence where this machine cannot compile a role's layers."""
    if lack := lacking(gpu):
        raise ValueError(
            f"train.compile = true, but for the role {role} {lack}, or set train.compile = false."
        )


def compile_layers(model: PreTrainedModel, threads: int, gpu: bool) -> None:
    """Have the decoder's layers compiled when they are first called, in place.

    Args:
        model: A packed decoder, with its hooks or before it gets them.
        threads: As many processes may compile at once; 1: this one alone.
        gpu: Whether for a GPU, where a layer is one graph.
    """
    import torch
    from transformers import AttentionInterface

    from engines.train.model.attention import PACKED, packed_attention
    from engines.train.model.fsdp import layers

    if not gpu:
        AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    # Options of Inductor's are of no use to another backend, and are refused by it.
    options: dict[str, str | int | bool | Callable[..., Any]] | None = None
    if BACKEND == "inductor":
        options = {"compile_threads": threads}
    for layer in layers(model):
        compiled = torch.compile(
            layer.forward, fullgraph=gpu, dynamic=True, backend=BACKEND, options=options
        )
        layer.forward = _with_room(compiled)


def _with_room(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's own limit is 8; settings of its compiler count in the thread that made them alone."""
    from torch._dynamo import config

    def forward(*inputs: Any, **named: Any) -> Any:
        with config.patch(recompile_limit=LIMIT):
            return compiled(*inputs, **named)

    return forward
