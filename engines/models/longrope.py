"""Rotary positions with two tables, of which a sequence has one by its own length (longrope).

transformers takes the table by the longest sequence of a batch (Ding et al., 2024, arXiv:2402.13753,
as Phi-3 and Phi-4 have it), so a short one beside a long one would have the wrong one. Here each
token says which it has: positions of long sequences are LONG higher.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

LONG = 2**30  # added to the positions of a sequence that is longer than the limit


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
        torch.where(long[..., None], theirs[:, :-1], own)
        for own, theirs in zip(short, far, strict=True)
    )
    return cos, sin
