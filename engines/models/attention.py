"""How tokens see others: which modules of a model do it, and causal attention with what models add.

Both engines of transformers' models compute with it (engines/train/model/attention.py,
engines/rollout/hf_rows.py). Queries are taken in blocks, so that a window costs its own length and
not the sequence's, and no [L, L] table of scores exists.

A mixer is a module that takes what was computed of earlier tokens (keys and values, or a state) and
has no such module below it. Mixers are found in the code, by no list: transformers' attention hands
its work to a function of a table (`ALL_ATTENTION_FUNCTIONS`), in which ours are; recurrent layers
(Mamba, gated delta-net, short convolutions, lightning attention) and the attention of some older
families do it themselves.

Some models have rotary positions with two tables, of which a sequence has one by its own length
(longrope; Ding et al., 2024, arXiv:2402.13753, as Phi-3 and Phi-4 have it). transformers takes the
table by the longest sequence of a batch, so a short one beside a long one would have the wrong one.
Here each token says which it has: positions of long sequences are LONG higher.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

BLOCK = 1024  # queries at once where keys differ by query
LONG = 2**30  # added to the positions of a sequence that is longer than the limit
_STATES = {"past_key_values", "past_key_value", "layer_past", "cache_params"}  # arguments
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_RECURRENT = re.compile(r"Mamba|SSM|Delta|Recurrent|Rglru|Lightning|LinearAtt|Conv(?!1D)|LSTM|Rwkv")


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
            sources = [q, k, v] if sinks is None else [q, k, v, sinks]
            slopes = torch.autograd.grad(out, sources, grad)
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


def rope_limit(config: PretrainedConfig) -> int | None:
    """The tokens up to which a sequence has the first table; None: there is one for all."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    limit = rope.get("original_max_position_embeddings")
    return int(limit or text.original_max_position_embeddings)


def rotate_by_sequence(model: PreTrainedModel) -> int | None:
    """Have a model read LONG in its positions, in place; the limit, or None for one table."""
    limit = rope_limit(model.config)
    if limit is None:
        return None
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.forward = partial(_rotated, module.forward, limit)
    return limit


def _rotated(
    forward: Callable[..., tuple[Tensor, Tensor]],
    limit: int,
    x: Tensor,
    position_ids: Tensor,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, D], of each token by the table that it says."""
    long = position_ids >= LONG
    # transformers takes the table by the largest position of a call.
    short = forward(x, position_ids.masked_fill(long, 0), **named)
    places = torch.where(long, position_ids - LONG, 0)
    last = places.new_full((len(places), 1), limit)
    far = forward(x, torch.cat([places, last], 1), **named)
    cos, sin = (
        torch.where(long[..., None], distant[:, :-1], near)
        for near, distant in zip(short, far, strict=True)
    )
    return cos, sin


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixers:
    """Those of a decoder, by how they mix."""

    attention: tuple[nn.Module, ...]  # by a function of transformers' table
    recurrent: tuple[nn.Module, ...]  # carry a state from token to token
    own: tuple[nn.Module, ...]  # neither

    @property
    def names(self) -> tuple[str, ...]:
        """Classes of those that do not call a function of the table."""
        return tuple(sorted({type(each).__name__ for each in (*self.recurrent, *self.own)}))


def mixers(model: PreTrainedModel) -> Mixers:
    """Of a model's decoder."""
    decoder = model.get_decoder()
    own_name = type(model).__name__.partition("For")[0]  # RecurrentGemma's norms are not recurrent
    kinds: dict[str, list[nn.Module]] = {"attention": [], "recurrent": [], "own": []}
    for module in _lowest(decoder):
        if _TABLE in _code(module).co_names:
            kinds["attention"].append(module)
        elif _is_recurrent(module, own_name):
            kinds["recurrent"].append(module)
        else:
            kinds["own"].append(module)
    return Mixers(**{kind: tuple(modules) for kind, modules in kinds.items()})


def hands_on(model: PreTrainedModel) -> bool:
    """Whether the decoder gives its keyword arguments to its layers, and these to attention."""
    decoder = model.get_decoder()
    attention = mixers(model).attention
    above = [
        module
        for module in decoder.modules()
        if _takes(module, _STATES)
        and not any(module is each for each in attention)
        and any(each in set(module.modules()) for each in attention)
    ]
    return all(_passes_on(module) for module in above) and all(
        _takes_any(module) for module in attention
    )


def _lowest(decoder: nn.Module) -> Iterator[nn.Module]:
    """Modules that take a state, none of whose parts does."""
    for module in decoder.modules():
        if module is decoder or not _takes(module, _STATES):
            continue
        if isinstance(module, GradientCheckpointingLayer):  # one whose part mixes nothing
            continue
        if not any(_takes(part, _STATES) for part in module.modules() if part is not module):
            yield module


def _is_recurrent(module: nn.Module, own_name: str) -> bool:
    named = _RECURRENT.search(type(module).__name__.removeprefix(own_name))
    return bool(named) or any(isinstance(part, nn.Conv1d) for part in module.children())


def _takes(module: nn.Module, names: set[str]) -> bool:
    return bool(names & inspect.signature(_forward(module)).parameters.keys())


def _takes_any(module: nn.Module) -> bool:
    parameters = inspect.signature(_forward(module)).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def _passes_on(module: nn.Module) -> bool:
    """Whether the code of a module calls something with arguments that it was given by any name."""
    calls = (step.opname for step in dis.get_instructions(_code(module)))
    return _takes_any(module) and "CALL_FUNCTION_EX" in calls


def _forward(module: nn.Module) -> Callable[..., Any]:
    return inspect.unwrap(type(module).forward)


def _code(module: nn.Module) -> Any:
    return _forward(module).__code__
