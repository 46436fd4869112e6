"""What vLLM 0.32 on a CPU does not do by itself: a fused norm, and experts packed at each load.

RMSNorm by the fused kernel that vLLM's library holds and does not use there. Without torch.compile
it computes the norm from a dozen small torch operations: for a model of 135 M parameters a quarter of
the time of a decoding step. The kernel comes in as a provider of vLLM's IR operations, which
engines/rollout/vllm_arguments.py asks for by name.

Experts are packed for their kernel at the first load only (not reported): after a weight sync it
would read plain numbers as packed ones. So each load makes the kernel, and packs, anew.

Where tokens are proposed, temperatures, top_k and top_p of the requests are spread over their tokens
by a kernel that writes into a copy, so that tokens are drawn with what the memory had; and of no
token top_k is not taken (not reported).

An adapter is multiplied by as one: vLLM copies it for each token, which may each have another one.

Its attention in bfloat16 uses AMX where the CPU has it, which a process must ask Linux for and vLLM
does not (not reported): the process is killed by SIGILL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from configs.environment import cpu_multiplies_bfloat16

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.v1.sample.metadata import SamplingMetadata

PROVIDER = "refrain_cpu"
OPERATIONS = ("rms_norm", "fused_add_rms_norm")
_VECTOR = 32  # rows of a multiple of so many elements suit the kernels, whatever the vector width


def register() -> None:
    """Make the kernels known to vLLM, before a model is built; again in a process changes nothing."""
    from vllm import ir
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    process = UnquantizedFusedMoEMethod.process_weights_after_loading

    def process_anew(method: UnquantizedFusedMoEMethod, layer: RoutedExperts) -> None:
        method.moe_kernel = None  # as before the first load
        process(method, layer)

    UnquantizedFusedMoEMethod.process_weights_after_loading = process_anew  # type: ignore[method-assign, assignment]

    rejection_sampler.apply_sampling_constraints = constrained

    of_several = PunicaWrapperCPU.add_lora_linear

    def add_lora_linear(
        punica: PunicaWrapperCPU,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **named: Any,
    ) -> None:
        arguments = (y, x, lora_a_stacked, lora_b_stacked, scale, output_slices)
        if len(lora_a_stacked[0]) > 1:
            of_several(punica, *arguments, **named)
        elif not punica.no_lora:
            add_adapter(*arguments)

    PunicaWrapperCPU.add_lora_linear = add_lora_linear  # type: ignore[method-assign, assignment]

    # vLLM compares the signatures, annotations included, with those of its own implementations.
    def plain(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return variance_size is None and _suits(x, weight)

    def added(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> bool:
        return variance_size is None and _suits(x, weight) and _suits(x_residual, weight)

    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=plain)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=added, inplace=True)(
        _fused_add_rms_norm
    )


def constrained(
    logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: SamplingMetadata
) -> Tensor:
    """Logits as each request wants them: vLLM's apply_sampling_constraints.

    Args:
        logits: [tokens, V] of the proposed ones of all requests; changed in place.
        cu_num_draft_tokens: [requests] where each request's tokens end.
        sampling_metadata: Temperatures, top_k and top_p [requests].
    """
    from vllm.v1.sample import rejection_sampler as vllm

    sampling, ends = sampling_metadata, cu_num_draft_tokens
    if sampling.all_greedy or not len(logits):
        return logits
    counts = ends.diff(prepend=ends.new_zeros(1))

    def spread(given: Tensor | None) -> Tensor | None:
        return None if given is None else given.repeat_interleave(counts)

    temperatures = spread(sampling.temperature)
    assert temperatures is not None, "not all are greedy"
    greedy = temperatures == vllm.GREEDY_TEMPERATURE
    logits.div_(temperatures.masked_fill(greedy, 1).unsqueeze(1))
    return vllm.apply_top_k_top_p(logits, spread(sampling.top_k), spread(sampling.top_p))


def add_adapter(
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    scale: float,
    output_slices: Sequence[int],
) -> None:
    """y += scale (x A^T) B^T, slice by slice of y's columns: vLLM's add_lora_linear of one adapter.

    Args:
        y: [..., out], changed in place. x: [..., in].
        lora_a_stacked, lora_b_stacked: [1, 1, rank, in] and [1, 1, width, rank] of each slice.
    """
    rows, out = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    tables = zip(lora_a_stacked, lora_b_stacked, strict=True)
    for part, (a, b) in zip(out.split(list(output_slices), dim=1), tables, strict=True):
        part.add_(linear(linear(rows, a[0, 0]), b[0, 0]), alpha=scale)


def _suits(x: Tensor, weight: Tensor | None) -> bool:
    """On x86 without AVX-512 the kernels cut bfloat16 off where torch rounds it (vLLM 0.32)."""
    return (
        weight is not None
        and (x.dtype != torch.bfloat16 or cpu_multiplies_bfloat16())
        and weight.dtype == x.dtype
        and x.shape[-1] % _VECTOR == 0
        and x.is_contiguous()
    )


def _rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def _fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
