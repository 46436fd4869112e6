"""RMSNorm, SwiGLU and RoPE in one pass each, forward and backward, keeping their inputs only.

Values round where transformers' own modules round, to bfloat16 after each step, but where a compiler
leaves a rounding between two steps out. Sources: Zhang and Sennrich, 2019 (arXiv:1910.07467);
Shazeer, 2020 (arXiv:2002.05202); Su et al., 2021 (arXiv:2104.09864).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a norm's input whose share of the weight's gradient one program adds up


@triton.jit
def _norm_forward(x, weight, y, scales, width, epsilon, block: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, block)
    inside = columns < width
    offsets = row.to(tl.int64) * width + columns
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + epsilon)
    tl.store(scales + row, scale)
    dtype = y.dtype.element_ty
    normed = (values * scale).to(x.dtype.element_ty)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    result = gain.to(tl.float32) * normed.to(tl.float32)
    tl.store(y + offsets, result.to(dtype), mask=inside)


@triton.jit
def _norm_backward(
    grad, x, weight, scales, grad_x, partial, rows, width, each, block: tl.constexpr
):
    program = tl.program_id(0)
    columns = tl.arange(0, block)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((block,), dtype=tl.float32)
    dtype = x.dtype.element_ty
    for number in range(each):
        row = program * each + number
        if row < rows:
            offsets = row.to(tl.int64) * width + columns
            grad_y = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
            values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
            scale = tl.load(scales + row)
            normed = values * scale
            total += grad_y * normed.to(dtype).to(tl.float32)
            inner = (grad_y * gain).to(dtype).to(tl.float32)
            mean = tl.sum(inner * normed, 0) / width
            tl.store(grad_x + offsets, (scale * (inner - normed * mean)).to(dtype), mask=inside)
    tl.store(partial + program.to(tl.int64) * width + columns, total, mask=inside)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        width = x.shape[-1]
        flat = x.reshape(-1, width)
        y = torch.empty_like(flat, dtype=torch.promote_types(x.dtype, weight.dtype))
        scales = torch.empty(len(flat), dtype=torch.float32, device=x.device)
        if len(flat):
            block = triton.next_power_of_2(width)
            _norm_forward[(len(flat),)](
                flat, weight, y, scales, width, epsilon, block=block, num_warps=warps(block)
            )
        ctx.save_for_backward(flat, weight, scales)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        rows, width = x.shape
        grad_x = torch.empty_like(x)
        programs = max(1, -(-rows // ROWS))
        partial = torch.zeros(programs, width, dtype=torch.float32, device=x.device)
        if rows:
            block = triton.next_power_of_2(width)
            flat = grad.reshape(rows, width).contiguous()
            _norm_backward[(programs,)](
                flat,
                x,
                weight,
                scales,
                grad_x,
                partial,
                rows,
                width,
                ROWS,
                block=block,
                num_warps=warps(block),
            )
        grad_weight = partial.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x.view(grad.shape), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * x / sqrt(mean x^2 + epsilon), with the mean over the last dimension; as Llama's.

    Args:
        x: [..., H]; what is normed is rounded to its dtype before it is multiplied by the weight.
        weight: [H].
        epsilon: Added to the mean of squares.
    """
    result: Tensor = _Norm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return result


@triton.jit
def _gated_forward(gate, up, out, count, block: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < count
    g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    active = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    tl.store(out + offsets, (active * u).to(dtype), mask=inside)


@triton.jit
def _gated_backward(grad, gate, up, grad_gate, grad_up, count, block: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < count
    grad_y = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
    dtype = gate.dtype.element_ty
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    active = (g * sigmoid).to(dtype).to(tl.float32)
    tl.store(grad_up + offsets, (grad_y * active).to(dtype), mask=inside)
    inner = (grad_y * u).to(dtype).to(tl.float32)
    tl.store(
        grad_gate + offsets, (inner * sigmoid * (1.0 + g * (1.0 - sigmoid))).to(dtype), mask=inside
    )


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        if gate.numel():
            _gated_forward[grid(gate)](gate, up, out, gate.numel(), block=BLOCK, num_warps=4)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            _gated_backward[grid(gate)](
                grad.contiguous(),
                gate,
                up,
                grad_gate,
                grad_up,
                gate.numel(),
                block=BLOCK,
                num_warps=4,
            )
        return grad_gate, grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of one shape and dtype; silu(x) = x / (1 + exp -x)."""
    result: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    out,
    heads,
    stride_head,
    stride_token,
    direction: tl.constexpr,
    half: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block_heads)[:, None]
    column = tl.arange(0, block_half)[None, :]
    inside = (head < heads) & (column < half)
    offsets = token * stride_token + head * stride_head + column
    dtype = out.dtype.element_ty
    first = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + offsets + half, mask=inside, other=0.0).to(tl.float32)
    angle = token * (2 * half) + column
    fits = column < half
    cos_1 = tl.load(cos + angle, mask=fits, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + angle + half, mask=fits, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + angle, mask=fits, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + angle + half, mask=fits, other=0.0).to(tl.float32)
    # Forward: x1 cos1 - x2 sin1, x2 cos2 + x1 sin2. Backward, of gradients g: the transpose of it.
    if direction > 0:
        cross_1, cross_2 = -(second * sin_1), first * sin_2
    else:
        cross_1, cross_2 = second * sin_2, -(first * sin_1)
    turned = (first * cos_1).to(dtype).to(tl.float32) + cross_1.to(dtype).to(tl.float32)
    right = (second * cos_2).to(dtype).to(tl.float32) + cross_2.to(dtype).to(tl.float32)
    target = out + token * heads * 2 * half + head * 2 * half + column
    tl.store(target, turned.to(dtype), mask=inside)
    tl.store(target + half, right.to(dtype), mask=inside)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    _, heads, tokens, size = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    out = torch.empty(1, tokens, heads, size, dtype=x.dtype, device=x.device)
    if tokens:
        half = size // 2
        rows = triton.next_power_of_2(heads)
        columns = triton.next_power_of_2(half)
        _rotate[(tokens,)](
            x,
            cos,
            sin,
            out,
            heads,
            x.stride(1),
            x.stride(2),
            direction=direction,
            half=half,
            block_heads=rows,
            block_half=columns,
            num_warps=max(1, min(8, rows * columns // 256)),
        )
    return out.transpose(1, 2)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin, as Llama's; the result's tokens stand one after the other.

    Args:
        x: [1, H, T, D] queries or keys of H heads, D even.
        cos, sin: [1, T, D], contiguous.
    """
    result: Tensor = _Rotated.apply(x, cos.contiguous(), sin.contiguous())  # type: ignore[no-untyped-call]
    return result


BLOCK = 1024  # elements of a program


def grid(x: Tensor) -> tuple[int]:
    """Programs for the elements of a tensor."""
    return (triton.cdiv(x.numel(), BLOCK),)


def warps(block: int) -> int:
    """Of a program that holds so many elements."""
    return max(1, min(16, block // 256))
