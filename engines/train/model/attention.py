"""Attention over packed sequences that may share their beginnings, as a function of transformers.

Tokens of a micro-batch lie in one row, [1, T, H]; a beginning that several sequences share is there
once. Only attention needs whole sequences: there tokens are copied to slots, one per position of each
sequence, and of each token the result of one copy is kept. So linear layers run on each token once
and on no padding, and no [T, T] mask exists.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from engines.models.attention import causal_attention

if TYPE_CHECKING:
    from engines.train.model.sequence_parallel import SequenceGroup

PACKED = "refrain_packed"  # name in transformers' table of attention functions
SHORT = 256  # tokens; up to there, on a CPU in bfloat16, plain matrix products are faster
CACHED_SCORES = 2**20  # scores that those work on at once: 4 MiB, which the cache holds
# Whether the kernel lets several query heads share a key head; that of torch 2.11 does not.
TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Sequences of similar length, padded on the right: slots start .. start + sequences x length."""

    start: int  # first slot
    sequences: int
    length: int  # slots of each


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayout:
    """Where the T tokens of a micro-batch stand in the S slots of its sequences.

    Example: prompt [5, 6] with the responses [7, 8, 9] and [4], on a CPU; T = 4 tokens [5, 6, 7, 8]
        expand   = [0, 1, 2, 3, 0, 1, 0]  # sequence 5 6 7 8, sequence 5 6, a spare slot
        collapse = [4, 5, 2, 3]  # of a shared token the slot in the shortest sequence counts
        copies   = ([[0, 1], [4, 5]],)  # both slots of token 0, and of token 1
        buckets  = Bucket(0, 1, 4), Bucket(4, 1, 2), Bucket(6, 1, 1)
    """

    expand: Tensor  # [S] int64: token in each slot; padding repeats some token
    collapse: Tensor  # [T] int64: the slot of each token whose result counts
    # [C, P] int64 each: all slots of P tokens, then padding slots. The first matrix is of the first
    # tokens, the next one of those that follow; the tokens after all of them have one slot.
    copies: tuple[Tensor, ...]
    buckets: tuple[Bucket, ...]  # dense batches for scaled_dot_product_attention; empty: use edges
    edges: Tensor | None  # [sequences + 1] int32: first slot of each sequence, for varlen_attn
    longest: int  # positions of the longest sequence


class _Expand(torch.autograd.Function):
    """x[expand]; its backward pass sums copies by gathering, in float32 and in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: AttentionLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.expand)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layout = ctx.layout
        result = grad.index_select(0, layout.collapse)
        start = 0
        for copies in layout.copies:
            number, count = copies.shape
            if number > 1:
                copied = grad.index_select(0, copies.flatten())
                torch.sum(copied.view(number, count, -1), 0, out=result[start : start + count])
            start += count
        return result, None


class _Collapse(torch.autograd.Function):
    """y[collapse]; its backward pass writes each token's gradient to the slot that it came from."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, layout: AttentionLayout) -> Tensor:
        ctx.layout, ctx.slots = layout, y.shape[0]
        return y.index_select(0, layout.collapse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result = grad.new_zeros(ctx.slots, grad.shape[1])
        result[ctx.layout.collapse] = grad
        return result, None


def expand(x: Tensor, layout: AttentionLayout) -> Tensor:
    """Tokens' rows [T, N] in their slots [S, N]; see AttentionLayout."""
    out = _Expand.apply(x, layout)
    assert isinstance(out, Tensor)
    return out


def collapse(y: Tensor, layout: AttentionLayout) -> Tensor:
    """Of each token the row [T, N] of the slot that counts, among the slots' [S, N]."""
    out = _Collapse.apply(y, layout)
    assert isinstance(out, Tensor)
    return out


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: AttentionLayout,
    sequence_group: SequenceGroup | None = None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, with the signature that transformers asks for.

    Args:
        module, attention_mask: Not used; the layout says what is attended to.
        query: [1, H, T, D] of H heads.
        key: [1, G, T, D]; H is a multiple of G.
        value: [1, G, T, E]; where E is not D, the smaller is padded with zeros (latent attention).
        packed_layout: Of the T tokens, as the caller passed it to the model.
        sequence_group: Ranks that share the tokens; then query, key and value are of this rank's
            alone, and so is what is returned.
        scaling: Factor on the scores.
        dropout: 0, to which an engine sets it.
        sliding_window: Tokens that each one attends to, itself included; None: all before it.
        softcap: Scores s become softcap x tanh(s / softcap).
        s_aux: [H], scores of each head's sink, a position without a value. With it, or with softcap,
            the layout has buckets.

    Returns:
        [1, T, H, E], and None for the scores.
    """
    assert not dropout, "nothing is dropped"
    if sliding_window is not None and sliding_window >= packed_layout.longest:
        sliding_window = None
    width = value.shape[3]
    query, key, value = _of_one_size(query, key, value)
    if sequence_group is not None:
        tokens = packed_layout.collapse.numel()
        query, key, value = sequence_group.to_heads(query, key, value, tokens)
    heads, size = query.shape[1], query.shape[3]
    q, k, v = (_to_slots(x, packed_layout) for x in (query, key, value))
    if packed_layout.edges is not None:
        assert softcap is None and s_aux is None, "`row_needs` asks for buckets"
        edges, longest = packed_layout.edges, packed_layout.longest
        out = varlen(q, k, v, edges, longest, scaling, sliding_window)
    else:
        further = Further(window=sliding_window, cap=softcap, sinks=s_aux)
        out = _dense(q, k, v, packed_layout, scaling, further)
    out = collapse(out.reshape(-1, heads * size), packed_layout).view(1, -1, heads, size)
    out = out if sequence_group is None else sequence_group.to_tokens(out)
    return (out if width == size else out[..., :width]), None


def _of_one_size(*heads: Tensor) -> list[Tensor]:
    """Each [1, H, T, D] with zeros up to the largest D: scores and the values' own part stay.

    Kernels for sequences of any length take no other values than of the size of keys.
    """
    largest = max(x.shape[3] for x in heads)
    return [x if x.shape[3] == largest else F.pad(x, (0, largest - x.shape[3])) for x in heads]


def _to_slots(x: Tensor, layout: AttentionLayout) -> Tensor:
    """[1, H, T, D] -> [S, H, D]."""
    _, heads, tokens, size = x.shape
    flat = x.transpose(1, 2).reshape(tokens, heads * size)
    return expand(flat, layout).view(-1, heads, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Further:
    """What a layer's attention has besides causal softmax."""

    window: int | None = None  # tokens; None: it is as long as the longest sequence
    cap: float | None = None  # of scores
    sinks: Tensor | None = None  # [H]

    @property
    def none(self) -> bool:
        return self.window is None and self.cap is None and self.sinks is None


def varlen(
    q: Tensor, k: Tensor, v: Tensor, edges: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """By a kernel for sequences of any length, on CUDA.

    Args:
        q: [S, H, D]. k, v: [S, G, D].
        edges, longest: As AttentionLayout has them.
        scale: Factor on the scores.
        window: Tokens that each one attends to, itself included; None: all before it.

    Returns:
        [S, H, D].
    """
    options: dict[str, Any] = {}
    sight = (-1 if window is None else window - 1, 0)  # tokens before and after one's own
    if TAKES_GROUPS:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    else:
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    out = varlen_attn(
        q, k, v, edges, edges, longest, longest, scale=scale, window_size=sight, **options
    )
    assert isinstance(out, Tensor)
    return out


def repeated(x: Tensor, heads: int) -> Tensor:
    """[S, G, D] -> [S, heads, D]: each head as often as query heads share it, one after the other.

    Expanded, not repeat_interleave: the backward pass of that adds in any order on a GPU.
    """
    slots, groups, size = x.shape
    if groups == heads:
        return x
    return x.unsqueeze(2).expand(-1, -1, heads // groups, -1).reshape(slots, heads, size)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, further: Further
) -> Tensor:
    """Padding stands on the right, so the causal mask alone keeps it from every real token."""
    parts = []
    for bucket in layout.buckets:
        slots = slice(bucket.start, bucket.start + bucket.sequences * bucket.length)
        shape = (bucket.sequences, bucket.length)
        query, key, value = (x[slots].view(*shape, *x.shape[1:]) for x in (q, k, v))
        if not further.none:
            out = _further_attention(query, key, value, scale, further)
        elif q.dtype == torch.bfloat16 and bucket.length <= SHORT and q.device.type == "cpu":
            out = _short_attention(query, key, value, scale)
        else:
            out = _long_attention(query, key, value, scale)
        parts.append(out.reshape(-1, *q.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _long_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q [B, L, H, D] to k and v [B, L, G, D]."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _further_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, further: Further) -> Tensor:
    """The same with what a layer has besides."""
    return causal_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        scale=scale,
        window=further.window,
        cap=further.cap,
        sinks=further.sinks,
    ).transpose(1, 2)


def _short_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The same by plain matrix products, some sequences at a time.

    A work-around: torch 2.13's CPU kernel for bfloat16 takes four times as long on short sequences,
    most of it in its backward pass (not reported).
    """
    batch, length, heads, size = q.shape
    groups = k.shape[2]
    share = heads // groups  # query heads of each key head; they become rows of one product
    rows = q.view(batch, length, groups, share, size).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch * groups, share * length, size)
    keys, values = (x.transpose(1, 2).reshape(batch * groups, length, size) for x in (k, v))
    mask = torch.full((length, length), -torch.inf).triu(1).repeat(share, 1)
    step = groups * max(1, CACHED_SCORES // (heads * length * length))
    parts = [
        _MatrixAttention.apply(*(x[at : at + step] for x in (rows, keys, values)), mask, scale)
        for at in range(0, batch * groups, step)
    ]
    out = torch.cat(parts).view(batch, groups, share, length, size)
    return out.permute(0, 3, 1, 2, 4)


class _MatrixAttention(torch.autograd.Function):
    """softmax(scale q k^T + mask) v for q [B, M, D], k and v [B, L, D], mask [M, L].

    Products in the inputs' dtype, the softmax in float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale).add_(mask)
        probs = scores.softmax(-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, probs)
        ctx.scale = scale
        return torch.bmm(probs, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probs = ctx.saved_tensors
        slopes = torch.bmm(grad, v.transpose(1, 2)).float()
        weights = probs.float()
        slopes.sub_((slopes * weights).sum(-1, keepdim=True)).mul_(weights).mul_(ctx.scale)
        slopes = slopes.to(q.dtype)
        grad_v = torch.bmm(probs.transpose(1, 2), grad)
        return torch.bmm(slopes, k), torch.bmm(slopes.transpose(1, 2), q), grad_v, None, None


AttentionInterface.register(PACKED, packed_attention)
