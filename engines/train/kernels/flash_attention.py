"""Attention by FlashAttention 3 or 4, to which torch hands it where a package has it.

torch's own kernel is FlashAttention 2. Torch replaces it for a whole process, so the roles of one
process have the same. As with other kernels a trial comes first; one that fails is an error here,
since the setting asks for the kernel by name.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor
    from transformers import PretrainedConfig

    from configs.train import FlashAttention

# What is installed, and the package that is imported first.
PACKAGES = {"FA3": ("flash-attn-3", "flash_attn_interface"), "FA4": ("flash-attn-4", "flash_attn")}
LENGTHS = (1, 70, 229)  # of a trial's sequences
WINDOW = 16  # tokens


def check_flash_attention(wanted: FlashAttention, role: str, gpus: int) -> None:
    """Raise ValueError in a sentence where a role cannot have it on this machine; without torch."""
    if wanted == "FA2":
        return
    install, module = PACKAGES[wanted]
    lack = "" if gpus else "has no GPU"
    if not lack and find_spec(module) is None:
        lack = f"needs the package {install}, which is not installed. Install it"
    if lack:
        end = ", or set" if gpus else ". Set"
        raise ValueError(
            f"train.flash_attention = {wanted}, but the role {role} {lack}{end} "
            "train.flash_attention = FA2."
        )


def use(wanted: FlashAttention, config: PretrainedConfig, device: torch.device) -> None:
    """Have torch compute attention by a kernel from now on, in this process; FA2 is its own.

    config: of the model, with whose heads the kernel is tried.

    Raises ValueError in a sentence where it cannot be had or computes something else.
    """
    from torch.nn import attention

    if not hasattr(attention, "activate_flash_attention_impl"):
        if wanted == "FA2":
            return
        raise _refused(wanted, "this torch has no other. Install torch 2.13 or newer")
    active = attention.current_flash_attention_impl()
    if wanted == "FA2":
        if active is not None:
            attention.restore_flash_attention_impl()
        return
    try:
        if active != wanted:
            attention.activate_flash_attention_impl(wanted)
    except (ImportError, RuntimeError, OSError) as error:
        raise _refused(wanted, f"torch cannot load it: {error}") from error
    heads = _heads(config.get_text_config())
    if heads is None:  # no layer of it has attention by heads
        return
    try:
        why = check_attention(_varlen, heads, device)
    except (RuntimeError, TypeError, AssertionError) as error:
        why = f"it fails on a trial: {error}"  # another GPU, other heads, or another release of it
    if why:
        attention.restore_flash_attention_impl()
        raise _refused(wanted, why)


def check_attention(
    attend: Callable[[Tensor, Tensor, Tensor, Sequence[int], int | None], Tensor],
    heads: tuple[int, int, int],
    device: torch.device,
) -> str:
    """Why a kernel's attention is not causal attention within each sequence; empty: it is.

    Values and gradients are compared with plain code's, but for rounding in bfloat16.

    Args:
        attend: Of q [S, H, D], k and v [S, G, D], the first slot of each sequence and the end of the
            last, and a window in tokens or None, the values [S, H, D].
        heads: H, G and D.
    """
    from engines.train.kernels.placing import alike, random_values

    queries, keys, size = heads
    edges = [0]
    for length in LENGTHS:
        edges.append(edges[-1] + length)
    shapes = ((edges[-1], number, size) for number in (queries, keys, keys))
    q, k, v = (random_values(*shape, device=device, seed=seed) for seed, shape in enumerate(shapes))

    def right(window: int | None) -> bool:
        return alike(
            lambda q, k, v: _plain(q, k, v, edges, window),
            lambda q, k, v: attend(q, k, v, edges, window),
            *([q, k, v], [q, k, v]),
        )

    for window, what in ((None, "a trial"), (WINDOW, f"a trial with a window of {WINDOW} tokens")):
        if not right(window):
            return f"on {what} it differs from plain attention"
    return ""


def _heads(config: PretrainedConfig) -> tuple[int, int, int] | None:
    """Heads of queries, of keys, and numbers in each."""
    queries = getattr(config, "num_attention_heads", None)
    if not queries:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    sizes = (getattr(config, name, None) or size for name in ("qk_head_dim", "v_head_dim"))
    compressed = getattr(config, "kv_lora_rank", None)  # latent attention: a head of keys for each
    keys = queries if compressed else getattr(config, "num_key_value_heads", None) or queries
    return queries, keys, max(sizes)


def _plain(q: Tensor, k: Tensor, v: Tensor, edges: Sequence[int], window: int | None) -> Tensor:
    import torch

    from engines.models.attention import causal_attention

    parts = []
    for start, stop in pairwise(edges):
        of_sequence = (x[None, start:stop].transpose(1, 2).float() for x in (q, k, v))
        out = causal_attention(*of_sequence, scale=q.shape[2] ** -0.5, window=window)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts).to(q.dtype)


def _varlen(q: Tensor, k: Tensor, v: Tensor, edges: Sequence[int], window: int | None) -> Tensor:
    import torch

    from engines.train.model.attention import varlen

    longest = max(stop - start for start, stop in pairwise(edges))
    first = torch.tensor(edges, dtype=torch.int32, device=q.device)
    return varlen(q, k, v, first, longest, q.shape[2] ** -0.5, window)


def _refused(wanted: str, why: str) -> ValueError:
    return ValueError(
        f"train.flash_attention = {wanted} ({PACKAGES[wanted][0]}), but {why.rstrip('.')}. Set "
        "train.flash_attention = FA2."
    )
