"""Floating-point operations of a model and peak rates of GPUs: what MFU is measured by.

Model FLOPs utilisation (Chowdhery et al., 2022, arXiv:2204.02311, appendix B) counts the operations
that the model needs, not those of recomputation or padding. Plans of a batch weigh rows by them too
(engines/train/batching/packing.py). Without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from engines.train.model.head import Head


class Trained(Protocol):
    """What the cost of a policy or a critic is known by."""

    model: Any  # of transformers

    @property
    def head(self) -> Head:
        """The last layer."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights."""


# FLOP/s of dense bfloat16 products with float32 sums, without sparsity, as the makers' data sheets
# state them. The first name that stands in the device's name counts, so longer names come first.
PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "MI300X": 1307e12,
    "RTX 4090": 165e12,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Floating-point operations of a forward pass, and of a backward pass.

    That costs once for the gradients of what a layer reads, once for those of its weights.
    """

    per_token: float = 1.0  # layers: 2 x their parameters
    per_response_token: float = 0.0  # output head: 2 x hidden size x vocabulary
    per_square: float = 0.0  # causal attention, per squared sequence length, with heads as wide as
    # the model together: the weight that plans of updates have, which a replay makes anew
    attention: float | None = None  # the same of the heads as they are; None: no other
    patches: int = 0  # tokens that an image becomes; 0: the model looks at none
    per_image: float = 0.0  # vision towers: 2 x their parameters, for each patch
    frozen: float = (
        0.0  # share of the layers' weights without a gradient; if any, the head has none
    )

    def forward(self, tokens: int, response_tokens: int, squares: int, images: int = 0) -> float:
        """FLOPs of a forward pass.

        Args:
            tokens: Positions that are computed, T.
            response_tokens: Rows of logits, R.
            squares: Sum of squared sequence lengths.
            images: That are looked at.
        """
        return (
            self.per_token * tokens
            + self.per_response_token * response_tokens
            + self.per_square * squares
            + self.per_image * images
        )

    @property
    def of_heads(self) -> CostModel:
        """What is really computed, where heads together are wider or narrower than the model."""
        return self if self.attention is None else replace(self, per_square=self.attention)

    def backward(self, tokens: int, response_tokens: int, squares: int, images: int = 0) -> float:
        """FLOPs of a backward pass, in which frozen weights take half; arguments as for `forward`."""
        unmade = self.frozen * self.per_token * tokens
        unmade += self.per_response_token * response_tokens if self.frozen else 0.0
        return 2 * self.forward(tokens, response_tokens, squares, images) - unmade


def cost_model(policy: Trained) -> CostModel:
    """The cost model of a policy or a critic, from its shapes, before it is sharded."""
    config = policy.model.config.get_text_config()
    head = policy.head.weight
    embedding = cast("Tensor", policy.model.get_input_embeddings().weight)
    tables = embedding.numel() + (0 if head is embedding else head.numel())
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    adapted = 0 < trained < parameters
    patches, vision = seeing(policy.model)
    return CostModel(
        patches=patches,
        per_image=2.0 * vision * patches,
        frozen=1.0 - trained / (parameters - tables) if adapted else 0.0,
        per_token=2.0 * (parameters - tables - vision),
        per_response_token=2.0 * head.numel(),
        per_square=2.0 * config.hidden_size * config.num_hidden_layers,
        attention=_attention(config),
    )


def _attention(config: Any) -> float | None:
    """FLOPs of causal attention per squared length: half of two products, queries and values."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    queries = getattr(config, "qk_head_dim", None) or size
    values = getattr(config, "v_head_dim", None) or size
    return 1.0 * heads * (queries + values) * config.num_hidden_layers


def seeing(model: Any) -> tuple[int, int]:
    """Tokens that an image becomes, and weights of the vision part; 0, 0: it looks at none."""
    from engines.models.vla.openvla import OpenVLA

    if not isinstance(model, OpenVLA):
        return 0, 0
    parts = (model.vision_backbone, model.projector)
    return model.patches, sum(weight.numel() for part in parts for weight in part.parameters())


def utilisation(rate: float, device: str, ranks: int) -> float | None:
    """Model FLOPs utilisation in [0, 1]; None where the device's peak is not known.

    Args:
        rate: FLOP/s of all ranks together.
        device: Name of each rank's device, such as `NVIDIA H100 80GB HBM3`.
        ranks: Number of devices.
    """
    peak = peak_flops(device)
    return None if peak is None else rate / (peak * ranks)


def peak_flops(device: str) -> float | None:
    """FLOP/s of a device by its name, such as `NVIDIA H100 80GB HBM3`; None where it is not known."""
    for name, rate in PEAKS.items():
        if re.search(rf"\b{re.escape(name)}\b", device):
            return rate
    return None
