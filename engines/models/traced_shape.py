"""The sizes of a decoder of any kind, as its own code was seen to make them; without torch.

`ModelShape` (facts.py) says by config.json what a decoder like Llama's holds and keeps. The code of
others is gone through once, without weights (engines/train/tracing.py), and this is what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from configs.lora import LoraConfig
from engines.models.facts import ModelShape


@dataclass(frozen=True, slots=True)
class Amount:
    """Memory, of which a part depends on the format of products."""

    numbers: float = 0.0  # in that format
    others: float = 0.0  # bytes in formats that stay: float32 of norms, indices

    def of(self, c: int) -> float:
        """Bytes, where a number in products has c."""
        return c * self.numbers + self.others


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a micro-batch: so much of each token, of each slot, of each pair of slots.

    Slots are those of whole sequences, tokens count once where sequences share them, and a pair is of
    a slot and a place in the longest sequence.
    """

    token: Amount
    slot: Amount
    pair: Amount

    def of(self, tokens: int, slots: int, longest: int, c: int) -> int:
        """Bytes, where a number in products has c."""
        each = self.token.of(c) * tokens + self.slot.of(c) * slots
        return round(each + self.pair.of(c) * slots * longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedLayer:
    """A decoder layer."""

    parameters: int
    experts: int  # of these in experts that are stacked
    input: Kept  # which is all that is kept where it is computed anew
    products: Kept  # results of matrix products and of attention
    attention: Kept  # results of attention alone
    kept: Kept  # for its backward pass


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedShape:
    """The sizes of a decoder and of what it keeps, by what its code does."""

    hidden: int  # width of the residual stream
    vocabulary: int  # tokens
    tied: bool  # whether the output head is the embedding
    heads: int  # of queries
    divisible: bool  # whether ranks that share samples may divide them
    parameters: int  # weights in all; a head that is tied counts once
    largest: int  # numbers in the largest of them
    stack: tuple[TracedLayer, ...]
    outside: Kept  # what is kept before, between and after the layers
    cached: int  # numbers that decoding keeps of each token, in all layers
    state: int  # numbers that it keeps of each sequence besides
    plain_cache: bool  # whether that is keys and values of heads alone, as vLLM has them too
    adapter: bool  # whether it was seen with the adapter that is trained
    linear: tuple[tuple[str, int], ...]  # last part of a linear layer's name, its inputs + outputs
    experts: tuple[tuple[str, int], ...]  # name of experts' weight, their inputs + outputs together

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.stack)

    @property
    def layer_parameters(self) -> int:
        """Weights of the largest."""
        return max(layer.parameters for layer in self.stack)

    @property
    def inside(self) -> int:
        """Weights of all of them."""
        return sum(layer.parameters for layer in self.stack)

    @property
    def vision(self) -> None:
        """It looks at no images."""
        return

    def cached_numbers(self, parts: int = 1) -> int:
        """Of a token, on each of so many devices."""
        return -(-self.cached // parts)

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TracedShape:
        """What `to_json` made; TypeError or KeyError for anything else."""
        stack = tuple(
            TracedLayer(
                parameters=layer["parameters"],
                experts=layer["experts"],
                **{name: _kept(layer[name]) for name in ("input", "products", "attention", "kept")},
            )
            for layer in values["stack"]
        )
        sizes = {
            kind: tuple((str(name), int(size)) for name, size in values[kind])
            for kind in ("linear", "experts")
        }
        return cls(**{**values, "stack": stack, "outside": _kept(values["outside"]), **sizes})


Shape: TypeAlias = ModelShape | TracedShape


def _kept(values: Mapping[str, Mapping[str, float]]) -> Kept:
    return Kept(**{name: Amount(**amount) for name, amount in values.items()})


def adapted_sizes(shape: ModelShape, lora: LoraConfig) -> list[int]:
    """Inputs and outputs, added, of each linear layer of a decoder layer that is adapted."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = {
        "q_proj": shape.hidden + queries,
        "k_proj": shape.hidden + keys,
        "v_proj": shape.hidden + keys,
        "o_proj": queries + shape.hidden,
        "gate_proj": shape.hidden + shape.intermediate,
        "up_proj": shape.hidden + shape.intermediate,
        "down_proj": shape.intermediate + shape.hidden,
    }
    return [size for name, size in sizes.items() if lora.adapts_layer(name)]


def adapter_parameters(shape: Shape, lora: LoraConfig) -> int:
    """Numbers in the factors of all adapted layers."""
    if isinstance(shape, TracedShape):
        sizes = [size for name, size in shape.linear if lora.adapts_layer(name)]
        sizes += [size for name, size in shape.experts if lora.adapts_experts(name)]
        return lora.rank * sum(sizes)
    return shape.layers * lora.rank * sum(adapted_sizes(shape, lora))
