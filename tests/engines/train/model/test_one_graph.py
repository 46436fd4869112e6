"""On a GPU a compiled layer is one graph: seen on a CPU with its layout and a stand-in for its kernel."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from engines.train.batching import packed_batch
from engines.train.batching.packed_batch import pack
from engines.train.model import attention, compiled
from engines.train.model.attention import PACKED
from engines.train.model.sequence_parallel import ALONE
from engines.train.policy import Policy


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Of one sequence [H, L, L], by softmax; heads of k are repeated already."""
    logits = q @ k.transpose(1, 2) * scale
    return logits.masked_fill(torch.ones(logits.shape[1:]).triu(1).bool(), -torch.inf).softmax(-1)


@torch.library.custom_op("refrain_tests::varlen", mutates_args={})
def by_edges(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, scale: float) -> Tensor:
    """Causal attention of each sequence alone; one operation, below autograd, as the kernel is."""
    share = q.shape[1] // k.shape[1]
    parts = []
    for a, b in pairwise(edges.tolist()):
        q1, k1, v1 = (x[a:b].transpose(0, 1) for x in (q, k, v))
        probs = scores(q1, k1.repeat_interleave(share, 0), scale)
        parts.append((probs @ v1.repeat_interleave(share, 0)).transpose(0, 1))
    return torch.cat(parts).contiguous()


@by_edges.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, scale: float) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("refrain_tests::varlen_backward", mutates_args={})
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, edges: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    share, results = q.shape[1] // k.shape[1], [torch.empty_like(x) for x in (q, k, v)]
    for a, b in pairwise(edges.tolist()):
        q1, k1, v1, g1 = (x[a:b].transpose(0, 1) for x in (q, k, v, grad))
        k2, v2 = (x.repeat_interleave(share, 0) for x in (k1, v1))
        probs = scores(q1, k2, scale)
        slopes = g1 @ v2.transpose(1, 2)
        slopes = probs * (slopes - (slopes * probs).sum(-1, keepdim=True)) * scale
        keys, values = slopes.transpose(1, 2) @ q1, probs.transpose(1, 2) @ g1
        results[0][a:b] = (slopes @ k2).transpose(0, 1)
        for result, whole in zip(results[1:], (keys, values), strict=True):
            result[a:b] = whole.unflatten(0, (-1, share)).sum(1).transpose(0, 1)
    return results[0], results[1], results[2]


@backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, edges: Tensor, scale: float) -> object:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


by_edges.register_autograd(
    lambda ctx, grad: (*backward(grad, *ctx.saved_tensors, ctx.scale), None, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(*inputs[:4]),
        setattr(ctx, "scale", inputs[4]),
    ),
)


def played(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: Tensor,
    _: Tensor,
    longest: int,
    __: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    result: Tensor = by_edges(q, k, v, edges, scale)
    return result


def model() -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Policy(LlamaForCausalLM(config))


def passed(policy: Policy) -> list[Tensor]:
    """Log-probs of micro-batches of several sizes, and the gradients of all."""
    results = []
    for number in (1, 2, 3, 5):
        random = np.random.default_rng(number)
        prompts = [random.integers(1, 30, 2 + number) for _ in range(number)]
        responses = [random.integers(1, 30, 1 + n) for n in range(number)]
        packed = pack(prompts, responses, "cuda")  # as on a GPU, with tensors that stay here
        logprobs, _ = policy(packed, ALONE, temperature=1.0, chunk=64, dtype=torch.float32)
        logprobs.sum().backward()
        results.append(logprobs.detach())
    return [*results, *(p.grad.clone() for p in policy.parameters() if p.grad is not None)]


@pytest.mark.slow
def test_layers_of_all_sizes_share_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(attention, "varlen_attn", played)
    monkeypatch.setattr(attention, "TAKES_GROUPS", True)
    monkeypatch.setattr(packed_batch, "put", lambda tensor, device: tensor)
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    AttentionInterface.register(PACKED, attention.packed_attention)
    torch._dynamo.reset()
    counters.clear()
    plain, policy = model(), model()
    compiled.compile_layers(policy.model, threads=1, gpu=True)
    expected, results = passed(plain), passed(policy)
    torch._dynamo.reset()
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]
