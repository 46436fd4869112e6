"""Causal attention with what models add to it: a window, a cap on scores, sinks.

Both engines of transformers' models compute with it (engines/train/model/attention.py,
engines/rollout/hf_rows.py). Queries are taken in blocks, so that a window costs its own length and
not the sequence's, and no [L, L] table of scores exists.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1024  # queries at once where keys differ by query


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each position to those up to itself.

    Args:
        q: [B, H, L, D]. k, v: [B, G, L, D]; H is a multiple of G.
        scale: Factor on the scores.
        window: Positions that each one attends to, itself included; None: all.
        cap: Scores s become cap x tanh(s / cap) (Gemma 2, arXiv:2408.00118); None: they stay.
        sinks: [H], scores of a position of each head that has no value (gpt-oss, arXiv:2508.10925).

    Returns:
        [B, H, L, D].
    """
    length = q.shape[2]
    if window is not None and window >= length:
        window = None
    if window is None and cap is None and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
    parts = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        queries = torch.arange(start, stop, device=q.device)[:, None]
        keys = torch.arange(first, stop, device=q.device)
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        parts.append(
            attention(
                q[:, :, start:stop],
                k[:, :, first:stop],
                v[:, :, first:stop],
                visible,
                scale=scale,
                cap=cap,
                sinks=sinks,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [B, H, M, D] to the keys [B, G, L, D] that are visible, bool [.., M, L]."""
    if cap is None and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scale, enable_gqa=grouped
        )
    out = _Scored.apply(q, k, v, sinks, visible, scale, cap)
    assert isinstance(out, Tensor)
    return out


class _Scored(torch.autograd.Function):
    """`attention` with a cap or sinks; its backward pass makes the scores again, and keeps none."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        visible: Tensor,
        scale: float,
        cap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks, visible)
        ctx.numbers = scale, cap
        return _scored(q, k, v, sinks, visible, scale, cap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, sinks, visible = ctx.saved_tensors
        scale, cap = ctx.numbers
        with torch.enable_grad():
            q, k, v = (each.detach().requires_grad_() for each in inputs)
            sinks = None if sinks is None else sinks.detach().requires_grad_()
            out = _scored(q, k, v, sinks, visible, scale, cap)
            wanted = [q, k, v] if sinks is None else [q, k, v, sinks]
            slopes = torch.autograd.grad(out, wanted, grad)
        return (*slopes, *(None for _ in range(7 - len(slopes))))


def _scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    visible: Tensor,
    scale: float,
    cap: float | None,
) -> Tensor:
    """By plain products; the softmax in float32."""
    batch, heads, count, size = q.shape
    groups = k.shape[1]
    rows = q.reshape(batch, groups, heads // groups, count, size)
    scores = (rows @ k.unsqueeze(2).transpose(3, 4)).float() * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    mask = visible if visible.dim() < 4 else visible.unsqueeze(2)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, groups, heads // groups, 1, 1)
        scores = torch.cat([scores, column.expand(batch, -1, -1, count, 1)], -1)
    probs = scores.softmax(-1)
    if sinks is not None:
        probs = probs[..., :-1]
    return (probs.to(v.dtype) @ v.unsqueeze(2)).reshape(batch, heads, count, v.shape[3])
