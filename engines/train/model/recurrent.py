"""Recurrent layers in a packed row: each sequence by itself, from an empty state.

The rest of a hybrid model computes each token once. A recurrent layer (Mamba, gated delta-net, short
convolution, lightning attention) gets its sequences as rows of a batch, padded on the right, where no
token reaches an earlier one. Of a token that several sequences begin with one copy's result is kept,
as in attention (attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from engines.train.model.attention import AttentionLayout, Bucket, collapse, expand

LAYOUT = "packed_layout"  # the argument that the decoder hands to its layers


def sequences_apart(model: PreTrainedModel, recurrent: Collection[nn.Module]) -> None:
    """Have a model's recurrent layers compute each packed sequence by itself, in place."""
    for layer in model.get_decoder().modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for module in layer.modules():
            if any(module is each for each in recurrent):
                rows = _Rows(module)
                # Within what is computed again in the backward pass, which so has the same layout.
                layer.register_forward_pre_hook(rows.note, with_kwargs=True)
                module.forward = rows


class _Rows:
    """A recurrent layer's forward pass; the layer around it says which tokens are of one sequence."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own: Callable[..., Any] = module.forward
        checkpointed = module.state_dict(keep_vars=True)
        # Buffers that a checkpoint holds as it holds weights.
        self._stored = [
            name
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and name in checkpointed
        ]
        self._layout: AttentionLayout | None = None

    def note(self, _: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Before the layer's forward pass; None: its tokens are of whole sequences."""
        self._layout = keywords.get(LAYOUT)

    def _forward(self, *inputs: Any, **keywords: Any) -> Any:
        states = next(each for each in (*inputs, *keywords.values()) if isinstance(each, Tensor))
        with _buffers_in(self._module, self._stored, states.dtype):
            return self._own(*inputs, **keywords)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        layout = self._layout
        if layout is None:
            return self._forward(*inputs, **keywords)
        results = [
            self._sequences(layout, bucket, inputs, keywords) for bucket in layout.buckets[:-1]
        ]
        first = results[0]
        parts = [out[0] if isinstance(out, tuple) else out for out in results]
        slots = torch.cat([part.flatten(0, 1) for part in parts])
        spare = slots.new_zeros(1, slots.shape[1])
        whole = collapse(torch.cat([slots, spare]), layout)[None]
        # What a layer gives besides is its state, of which nobody asks.
        return (whole, *(None for _ in first[1:])) if isinstance(first, tuple) else whole

    def _sequences(
        self,
        layout: AttentionLayout,
        bucket: Bucket,
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """What the layer gives of a bucket's sequences [B, L, H], from all tokens' [1, T, H]."""

        def rows(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(rows(each) for each in value)
            if not isinstance(value, Tensor) or value.shape[:2] != (1, layout.collapse.numel()):
                return value
            flat = expand(value[0].reshape(value.shape[1], -1), layout)
            rows_of_bucket = flat[bucket.start : bucket.start + bucket.sequences * bucket.length]
            return rows_of_bucket.view(bucket.sequences, bucket.length, *value.shape[2:])

        return self._forward(
            *(rows(each) for each in inputs),
            **{name: rows(each) for name, each in keywords.items()},
        )


@contextmanager
def _buffers_in(module: nn.Module, names: list[str], dtype: torch.dtype) -> Iterator[None]:
    """With some buffers of a module in the format of its products.

    FSDP gathers weights in that format and leaves buffers as they are; MiniMax multiplies both.
    """
    buffers = {name: module.get_buffer(name) for name in names}
    for name, buffer in buffers.items():
        setattr(module, name, buffer.to(dtype))
    try:
        yield
    finally:
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
