"""Each Triton kernel beside the plain code that it stands for.

Run by test_kernels.py in a process of its own: in Triton's interpreter on a CPU, on a GPU as compiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SIZES = [(5, 16, 48), (1, 8, 17), (7, 32, 4097), (0, 8, 20)]


@pytest.fixture(autouse=True, scope="module")
def _casts_round() -> Iterator[None]:
    """Triton 3.6's interpreter cuts digits off where a device rounds to the nearest."""
    if DEVICE == "cuda":
        yield
        return
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (interpreter.tl.float32, interpreter.tl.bfloat16):
            return cut(data, source, target, mode)
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        bits = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return bits.reshape(np.shape(data))

    interpreter._convert_float = rounded
    yield
    interpreter._convert_float = cut


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engines.train.logprobs.available", lambda tensor: tensor.dtype != torch.float64
    )


def head_case(
    rows: int, width: int, words: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows + words)
    hidden = torch.randn(rows, width, generator=random).to(DEVICE, dtype)
    weight = torch.randn(words, width, generator=random).to(DEVICE, dtype)
    labels = torch.randint(0, words, (rows,), generator=random).to(DEVICE)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """By torch's own softmax in float64, of the product in the inputs' dtype."""
    logits = (hidden @ weight.t()).double() / temperature
    table = logits.log_softmax(-1)
    probs = table.exp()
    logprobs = table.gather(1, labels[:, None])[:, 0]
    return logprobs, -(probs * table).sum(-1), probs.square().sum(-1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk", [1, 64])  # in blocks, and all logits at once
def test_head_in_float32(
    size: tuple[int, int, int], temperature: float, entropy_gradient: bool, chunk: int
) -> None:
    from engines.train.logprobs import token_statistics

    hidden, weight, labels = head_case(*size, torch.float32)
    stats = token_statistics(
        hidden,
        weight,
        labels,
        temperature=temperature,
        chunk=chunk,
        entropy_gradient=entropy_gradient,
        squared=True,
    )
    logprobs, entropy, squares = plain(hidden, weight, labels, temperature)
    for ours, theirs in ((stats.logprobs, logprobs), (stats.entropy, entropy)):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)
    assert stats.sum_pi_squared is not None
    torch.testing.assert_close(stats.sum_pi_squared.double(), squares, atol=1e-6, rtol=1e-5)
    slope = torch.linspace(-1, 2, size[0], device=DEVICE)
    loss = (slope * stats.logprobs).sum()
    other = (slope * logprobs).sum()
    if entropy_gradient:
        loss, other = loss + (slope * stats.entropy).sum(), other + (slope * entropy).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))
    for ours, theirs in zip(grads, torch.autograd.grad(other, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_head_in_bfloat16_is_as_near_to_float64_as_the_plain_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engines.train.logprobs import token_statistics

    hidden, weight, labels = head_case(33, 64, 3000, torch.bfloat16)
    stats = token_statistics(hidden, weight, labels, chunk=8)
    ours = torch.autograd.grad(stats.logprobs.sum(), (hidden, weight))
    exact, _, _ = plain(hidden, weight, labels, 1.0)
    torch.testing.assert_close(stats.logprobs.double(), exact, atol=2e-5, rtol=2e-5)
    monkeypatch.setattr("engines.train.logprobs.available", lambda tensor: False)
    stats = token_statistics(hidden, weight, labels, chunk=8)
    usual = torch.autograd.grad(stats.logprobs.sum(), (hidden, weight))
    truth = torch.autograd.grad(exact.sum(), (hidden, weight))
    near(ours, usual, truth)


def test_a_word_that_cannot_be_has_no_part() -> None:
    from engines.train.logprobs import token_statistics

    hidden = torch.ones(2, 1, device=DEVICE)
    weight = torch.tensor([[0.0], [-torch.inf], [1.0]], device=DEVICE)
    stats = token_statistics(hidden, weight, torch.tensor([0, 2], device=DEVICE))
    expected = torch.tensor([0.0, 1.0], device=DEVICE).log_softmax(0)
    torch.testing.assert_close(stats.logprobs, expected)
    assert stats.entropy.isfinite().all()


def near(ours: Sequence[Tensor], theirs: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """No further from the exact gradients than the plain code's."""
    for kernel, code, best in zip(ours, theirs, truth, strict=True):
        off, other = ((x.double() - best.double()).norm() for x in (kernel, code))
        assert off <= 1.05 * other + 1e-5 * best.double().norm()


DTYPES = [torch.float32, torch.bfloat16]


def exact(ours: Tensor, theirs: Tensor, ulps: int = 0) -> None:
    """Equal but for so many last digits of bfloat16, or float32's rounding."""
    assert ours.dtype == theirs.dtype
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    elif not ulps:
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    else:
        torch.testing.assert_close(ours, theirs, atol=ulps * 2.0**-9, rtol=ulps * 2.0**-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 37, 96), (1, 3, 100), (2, 5, 8), (1, 0, 16)])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    from engines.train.kernels.layers import rms_norm

    torch.manual_seed(0)
    module = Qwen2RMSNorm(shape[-1]).to(DEVICE, dtype)
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5)
    x = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
    slope = torch.randn(shape, device=DEVICE).to(dtype)
    theirs, ours = module(x), rms_norm(x, module.weight, module.variance_epsilon)
    exact(ours, theirs, ulps=1)
    inputs = (x, module.weight)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    scale = (wide[0].square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
    truth = torch.autograd.grad(wide[1] * (wide[0] * scale), wide, slope.double())
    near(
        torch.autograd.grad(ours, inputs, slope), torch.autograd.grad(theirs, inputs, slope), truth
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 9, 64), (3, 1031), (0, 4)])
def test_swiglu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from engines.train.kernels.layers import swiglu

    torch.manual_seed(0)
    gate, up, slope = ((3 * torch.randn(shape, device=DEVICE)).to(dtype) for _ in range(3))
    gate.requires_grad_()
    up.requires_grad_()
    theirs, ours = torch.nn.functional.silu(gate) * up, swiglu(gate, up)
    exact(ours, theirs, ulps=1)
    for own, other in zip(
        torch.autograd.grad(ours, (gate, up), slope),
        torch.autograd.grad(theirs, (gate, up), slope),
        strict=True,
    ):
        exact(own, other, ulps=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 14, 19, 64), (1, 3, 5, 48), (1, 2, 0, 16)])
def test_rotary(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    from engines.train.kernels.layers import rotary

    torch.manual_seed(0)
    _, heads, tokens, size = shape
    rows = torch.randn(1, tokens, heads * size, device=DEVICE).to(dtype).requires_grad_()
    angles = torch.rand(1, tokens, size // 2, device=DEVICE).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x = rows.view(1, tokens, heads, size).transpose(1, 2)
    theirs, _ = apply_rotary_pos_emb(x, x, cos, sin)
    ours = rotary(x, cos, sin)
    exact(ours, theirs, ulps=0 if DEVICE == "cpu" else 2)  # compiled, sums are rounded once
    slope = torch.randn(shape, device=DEVICE).to(dtype)
    exact(torch.autograd.grad(ours, rows, slope)[0], torch.autograd.grad(theirs, rows, slope)[0], 2)


def tiny(family: str) -> Any:
    """A random model of a family, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    facts: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **facts)
    return AutoModelForCausalLM.from_config(config).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "norms", "gates", "rotations"),
    [
        ("llama", 5, 2, 2),
        ("qwen2", 5, 2, 2),
        ("qwen3", 9, 2, 2),  # norms of queries and keys
        ("gemma2", 0, 0, 2),  # a gain of 1 + weight, another activation
        ("olmo2", 9, 2, 2),  # rounds its norms later; with float32 angles its rotations are its own
        ("glm4", 9, 0, 0),  # interleaved rotations, one product for gate and up
    ],
)
def test_kernels_stand_where_they_compute_the_same(
    family: str, norms: int, gates: int, rotations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.train.kernels import placing

    monkeypatch.setattr(placing, "available", lambda tensor: True)
    model = tiny(family)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]], device=DEVICE)

    def passed() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        logits.float().log_softmax(-1)[0, :, 3].sum().backward()
        return logits.float(), [p.grad.float() for p in model.parameters() if p.grad is not None]

    module = sys.modules[type(model).__module__]
    before, slopes = passed()
    own = vars(module).get(placing.ROPE)
    try:
        counts = placing.place_kernels(model, torch.device(DEVICE))
        after, ours = passed()
    finally:
        vars(module)[placing.ROPE] = own
    assert counts == {"rms_norm": norms, "swiglu": gates, "rotary": rotations}
    assert (after - before).norm() <= 2**-6 * before.norm()
    for mine, theirs in zip(ours, slopes, strict=True):
        assert (mine - theirs).norm() <= 2**-5 * theirs.norm()
