"""Attention by varlen_attn, which runs on GPUs only: here a plain computation plays it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.train.batching import packed_batch
from engines.train.batching.packed_batch import pack
from engines.train.model import attention
from engines.train.model.attention import AttentionLayout, packed_attention, repeated

HEADS, GROUPS, SIZE = 6, 2, 8
# The first two prompts are one, in two sequences.
PROMPTS = [np.array(row) for row in ([5, 6, 7], [5, 6, 7], [8])]
RESPONSES = [np.array(row) for row in ([1, 2], [3, 4, 9], [2, 2, 2, 2])]


def by_sequence(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, scale: float) -> Tensor:
    """Causal attention within each sequence, of tensors with as many heads each."""
    assert q.shape == k.shape == v.shape
    parts = []
    for a, b in pairwise(edges.tolist()):
        q1, k1, v1 = (x[a:b].transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, scale=scale)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Takes as many key heads as query heads."""
    assert window_size == (-1, 0)
    assert scale is not None
    return by_sequence(query, key, value, cu_seq_q, scale)


def of_torch_2_13(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Takes fewer key heads where it is told so."""
    if enable_gqa:
        share = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    return of_torch_2_11(
        *(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k),
        scale=scale,
        window_size=window_size,
    )


def packed(layout: AttentionLayout, groups: int, values: int = SIZE) -> list[Tensor]:
    """What attention gives for drawn tokens, and its gradients for query, key and value."""
    generator = torch.Generator().manual_seed(3)
    tokens = layout.collapse.numel()
    sizes = ((HEADS, SIZE), (groups, SIZE), (groups, values))
    shapes = [(1, heads, tokens, size) for heads, size in sizes]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    out, _ = packed_attention(
        torch.nn.Identity(), *inputs, None, packed_layout=layout, scaling=SIZE**-0.5
    )
    weights = torch.randn(out.shape, generator=generator)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("groups", [1, GROUPS, HEADS])
@pytest.mark.parametrize("played", [of_torch_2_11, of_torch_2_13])
def test_the_kernel_for_gpus_gives_what_attention_on_a_cpu_gives(
    monkeypatch: pytest.MonkeyPatch, played, groups: int
) -> None:
    dense = pack(PROMPTS, RESPONSES).layout
    monkeypatch.setattr(packed_batch, "put", lambda tensor, device: tensor)
    by_edges = pack(PROMPTS, RESPONSES, "cuda").layout  # as on a GPU, with tensors that stay here
    assert by_edges.edges is not None
    monkeypatch.setattr(attention, "varlen_attn", played)
    takes = "enable_gqa" in inspect.signature(played).parameters
    monkeypatch.setattr(attention, "TAKES_GROUPS", takes)
    for ours, theirs in zip(packed(by_edges, groups), packed(dense, groups), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("values", [SIZE - 3, SIZE + 4])
def test_values_of_another_size_than_queries(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    """As in latent attention (DeepSeek-V2, MiniCPM3)."""

    def plain(module, q, k, v, mask, *, packed_layout: AttentionLayout, scaling: float):
        expanded = [x[0].index_select(1, packed_layout.expand) for x in (q, k, v)]
        keys, slots = [repeated(x.transpose(0, 1), HEADS).transpose(0, 1) for x in expanded[1:]], []
        for bucket in packed_layout.buckets:
            for row in range(bucket.sequences):
                at = bucket.start + row * bucket.length
                part = slice(at, at + bucket.length)
                scores = scaling * expanded[0][:, part] @ keys[0][:, part].transpose(1, 2)
                hidden = torch.ones(bucket.length, bucket.length).triu(1).bool()
                weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
                slots.append(weights @ keys[1][:, part])
        return torch.cat(slots, 1).index_select(1, packed_layout.collapse).transpose(0, 1)[
            None
        ], None

    layout = pack(PROMPTS, RESPONSES).layout
    ours = packed(layout, GROUPS, values)
    monkeypatch.setattr(inspect.getmodule(packed), "packed_attention", plain)
    theirs = packed(layout, GROUPS, values)
    assert ours[0].shape[-1] == values
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("values", [SIZE - 3, SIZE + 4])
def test_the_kernel_for_gpus_takes_values_of_another_size(
    monkeypatch: pytest.MonkeyPatch, values: int
) -> None:
    dense = pack(PROMPTS, RESPONSES).layout
    monkeypatch.setattr(packed_batch, "put", lambda tensor, device: tensor)
    by_edges = pack(PROMPTS, RESPONSES, "cuda").layout
    monkeypatch.setattr(attention, "varlen_attn", of_torch_2_11)  # which asserts that sizes agree
    monkeypatch.setattr(attention, "TAKES_GROUPS", False)
    pairs = zip(packed(by_edges, GROUPS, values), packed(dense, GROUPS, values), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def test_the_installed_kernel_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_batch, "put", lambda tensor, device: tensor)
    layout = pack(PROMPTS, RESPONSES, "cuda").layout
    assert layout.edges is not None
    tokens = layout.collapse.numel()
    layout = replace(
        layout,
        expand=layout.expand.to("meta"),
        collapse=layout.collapse.to("meta"),
        edges=layout.edges.to("meta"),
    )
    inputs = [
        torch.empty(1, heads, tokens, SIZE, device="meta") for heads in (HEADS, GROUPS, GROUPS)
    ]
    out, _ = packed_attention(
        torch.nn.Identity(), *inputs, None, packed_layout=layout, scaling=SIZE**-0.5
    )
    assert out.shape == (1, tokens, HEADS, SIZE)


def test_query_heads_that_share_a_key_head_are_neighbours() -> None:
    x = torch.arange(4.0).view(1, 2, 2)  # one slot, heads [0, 1] and [2, 3]
    assert repeated(x, 4).tolist() == [[[0, 1], [0, 1], [2, 3], [2, 3]]]
    assert repeated(x, 2) is x
