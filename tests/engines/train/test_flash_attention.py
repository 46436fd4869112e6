"""Attention by a package that torch hands it to: found right on a trial, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

from configs.train import TrainConfig
from engines.train import fsdp_engine
from engines.train.kernels import flash_attention
from engines.train.kernels.flash_attention import check_attention, use

CPU = torch.device("cpu")
LLAMA = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: Sequence[int],
    window: int | None,
    *,
    before: int = 0,
    across: bool = False,
    later: bool = False,
) -> Tensor:
    """By torch's attention with a mask of all slots; `before`: so many fewer tokens are seen.

    across: sequences see those before them. later: tokens see those after them too.
    """
    slots = torch.arange(edges[-1])
    sequence = torch.bucketize(slots, torch.tensor(edges[1:]), right=True)
    seen = (slots[:, None] >= slots) | later
    seen &= (sequence[:, None] == sequence) | across
    if window is not None:
        seen &= slots[:, None] - slots < window - before
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
    return out[0].transpose(0, 1)


def detached(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Right values, and gradients of zero to the keys."""
    return masked(q, k.detach() + 0 * k, v, *rest)


@pytest.fixture
def package() -> Iterator[list[str]]:
    """A FlashAttention 3 for torch, and what torch did with it."""
    events: list[str] = []

    class Handle:
        def remove(self) -> None:
            events.append("removed")

    def register() -> Handle:
        events.append("registered")
        return Handle()

    own = attention._registry._FLASH_ATTENTION_IMPLS["FA3"]
    attention.register_flash_attention_impl("FA3", register_fn=register)
    yield events
    attention.register_flash_attention_impl("FA3", register_fn=own)
    attention.restore_flash_attention_impl(_raise_warn=False)


def test_a_right_kernel_passes() -> None:
    assert check_attention(masked, (4, 2, 16), CPU) == ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (partial(masked, across=True), "on a trial it differs from plain attention"),
        (partial(masked, later=True), "on a trial it differs from plain attention"),
        (partial(masked, before=1), "on a trial with a window of 16 tokens it differs"),
        (detached, "on a trial it differs from plain attention"),
    ],
)
def test_a_wrong_kernel_is_found(wrong: Any, says: str) -> None:
    assert says in check_attention(wrong, (4, 2, 16), CPU)


def test_it_is_used_and_let_go(package: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_varlen", masked)
    use("FA3", LLAMA, CPU)
    use("FA3", LLAMA, CPU)
    assert (attention.current_flash_attention_impl(), package) == ("FA3", ["registered"])
    use("FA2", LLAMA, CPU)
    assert (attention.current_flash_attention_impl(), package[1:]) == (None, ["removed"])


def unfit(*_: Any) -> Tensor:
    raise RuntimeError(
        "FA3 flash_attention forward unsupported: FA3 requires compute capability 9.0"
    )


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (partial(masked, across=True), "but on a trial it differs from plain attention. Set"),
        (
            unfit,
            "but it fails on a trial: FA3 flash_attention forward unsupported: FA3 requires compute "
            "capability 9.0. Set",
        ),
        (lambda q, k, v: q, "but it fails on a trial: "),
    ],
)
def test_what_fails_its_trial_is_refused_and_let_go(
    package: list[str], monkeypatch: pytest.MonkeyPatch, kernel: Any, says: str
) -> None:
    monkeypatch.setattr(flash_attention, "_varlen", kernel)
    with pytest.raises(ValueError, match=r"^train\.flash_attention = FA3 \(flash-attn-3\)") as said:
        use("FA3", LLAMA, CPU)
    assert says in str(said.value)
    assert (attention.current_flash_attention_impl(), package) == (None, ["registered", "removed"])


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="torch cannot load it: No module named 'flash_attn"):
        use("FA4", LLAMA, CPU)


def test_a_torch_without_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn, "attention", ModuleType("attention"))
    use("FA2", LLAMA, CPU)
    with pytest.raises(ValueError, match=r"this torch has no other\. Install torch 2\.13 or newer"):
        use("FA3", LLAMA, CPU)


def test_a_kernel_is_tried_with_the_models_heads() -> None:
    heads = flash_attention._heads
    assert heads(LLAMA) == (4, 2, 16)
    assert heads(Qwen3Config(num_attention_heads=8, num_key_value_heads=2, head_dim=128)) == (
        8,
        2,
        128,
    )
    latent = DeepseekV3Config(num_attention_heads=4, qk_nope_head_dim=32, qk_rope_head_dim=16)
    assert heads(latent) == (4, 4, max(48, latent.v_head_dim))


@pytest.mark.parametrize(("device", "asked"), [("cuda", ["FA3"]), ("cpu", [])])
def test_an_engine_on_a_gpu_uses_what_is_set(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: list[str]
) -> None:
    class Over(Exception):
        """What comes after needs the device."""

    def stop(*_: Any, **__: Any) -> None:
        raise Over

    wanted: list[str] = []
    monkeypatch.setattr(flash_attention, "use", lambda version, *_: wanted.append(version))
    monkeypatch.setattr(fsdp_engine, "whole_on", stop)
    train = TrainConfig(flash_attention="FA3", kernels=False)
    nothing: Any = None
    spec: Any = SimpleNamespace(train=train)
    meeting: Any = SimpleNamespace(
        device=torch.device(device), group=SimpleNamespace(size=lambda: 1)
    )
    policy: Any = SimpleNamespace(model=SimpleNamespace(config=LLAMA))
    monkeypatch.setattr(fsdp_engine, "checkpoint_layers", lambda *_: None)
    with pytest.raises(Over):
        fsdp_engine.materialize(policy, spec, nothing, meeting, nothing, nothing)
    assert wanted == asked


@pytest.mark.gpu(1)
def test_flash_attention_3_on_a_gpu() -> None:
    pytest.importorskip("flash_attn_interface")
    use(
        "FA3",
        LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=2),
        torch.device("cuda"),
    )
    use("FA2", LLAMA, torch.device("cuda"))
