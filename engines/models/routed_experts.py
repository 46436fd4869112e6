"""The experts to which a sampler's routers sent each token, as samples carry them to the trainer.

With them the trainer's routers send tokens where the sampler's did: routing replay (Ma et al., 2025,
arXiv:2510.11370). What routers are is in routers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

# [S, L, k] ids of k experts of each of S tokens, in each of L layers that have routers. The largest
# number of the format stands for a choice that is not known: there a router makes its own.
RoutedExperts: TypeAlias = NDArray[np.unsignedinteger[Any]]

# Their columns; see storage/batches/columns.py.
OF_PROMPT, OF_RESPONSE = "prompt_routed_experts", "routed_experts"


def no_tokens(layers: int, top_k: int, experts: int) -> RoutedExperts:
    """Those of no token, [0, L, k], in the narrowest format for that many experts."""
    dtype: type[np.unsignedinteger[Any]] = np.uint8 if experts < 256 else np.uint16
    return np.zeros((0, layers, top_k), dtype)


def extended(chosen: RoutedExperts, tokens: int) -> RoutedExperts:
    """[tokens, L, k]: with as many further tokens whose experts are not known."""
    lack = np.full((tokens - len(chosen), *chosen.shape[1:]), _unknown(chosen), chosen.dtype)
    return np.concatenate([chosen, lack])


def merged(before: RoutedExperts, now: RoutedExperts) -> RoutedExperts:
    """Of the first tokens of a sequence, as they were sampled; else as they are computed now.

    Args:
        before: [B, L, k]. now: [S, L, k], of the same sequence from its first token on.
    """
    if len(before) > len(now):
        now = extended(now, len(before))
    joined = now.copy()
    told = (before != _unknown(before)).all((1, 2))
    joined[: len(before)][told] = before[told]
    return joined


def checked(chosen: NDArray[np.integer], like: RoutedExperts, experts: int) -> RoutedExperts:
    """In the format of `like`; ValueError unless they are ids of experts, as many as there."""
    if chosen.shape[1:] != like.shape[1:]:
        raise ValueError(
            f"The engine gave routed experts of shape {chosen.shape}, and the model has "
            f"{like.shape[1]} layers with {like.shape[2]} experts a token."
        )
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < experts:
        raise ValueError(
            f"The engine gave expert {chosen.max()} of a token, and the model has {experts} experts."
        )
    typed: RoutedExperts = chosen.astype(like.dtype)
    return typed


def as_ids(chosen: RoutedExperts) -> NDArray[np.int16]:
    """[S, L, k] with -1 where the choice is not known."""
    return np.where(chosen == _unknown(chosen), -1, chosen.astype(np.int32)).astype(np.int16)


def _unknown(chosen: RoutedExperts) -> int:
    return int(np.iinfo(chosen.dtype).max)


def write_by_prompt(
    store: Store, out_key: str, columns: Mapping[str, object], places: NDArray[np.int64]
) -> BatchRef:
    """Store columns of samples, of whose prompts' tokens the experts are stored once.

    places: [N] prompt of each, ascending.
    """
    if OF_PROMPT not in columns:
        return write_batch(store, out_key, columns)
    experts = cast("list[RoutedExperts]", columns[OF_PROMPT])
    _, first, count = np.unique(places, return_index=True, return_counts=True)
    once = [each[:0] for each in experts]
    for start, size in zip(first.tolist(), count.tolist(), strict=True):
        once[start] = max(experts[start : start + size], key=len)
    ref = write_batch(store, out_key, {**columns, OF_PROMPT: once})
    return ref.with_columns(ref[[OF_PROMPT]].take(np.repeat(first, count)))
