"""What a model of any kind holds and keeps, seen by going through its code without memory.

python -m engines.train.tracing DIRECTORY TOKENS FORMAT [LORA] prints a line of JSON.
Nothing is computed (torch's FakeTensorMode: operations give shapes alone), so a model of any size
takes seconds. Counted is what autograd keeps of three micro-batches of the train engine's own packed
rows.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from configs.lora import LoraConfig
from engines.models.checkpoints import build_without_values
from engines.models.routers import find_experts
from engines.models.traced_shape import Amount, Kept, TracedLayer, TracedShape
from engines.train.activations import is_product
from engines.train.batching.packed_batch import PackedBatch, RowNeeds, pack, why_together
from engines.train.model.fsdp import layers
from engines.train.model.lora import expert_weights, inject, linear_layers
from engines.train.model.sequence_parallel import ALONE
from engines.train.policy import decoder_states, use_packed_attention

PROMPTS = 2  # a lone sequence has views where others have copies
PROBED = (8, 16)  # tokens of sequences whose operations are counted
MORE = 1.2  # times as many for twice the tokens: code that takes one after the other
DECODED = (4, 8)  # tokens of sequences whose cache is looked at: below any window
OUTSIDE = -1  # in place of a layer's number


@dataclass
class _PassMemory:
    """Of one micro-batch, by layer."""

    operations: int = 0  # of torch
    kept: dict[int, Amount] = field(default_factory=lambda: defaultdict(Amount))
    products: dict[int, Amount] = field(default_factory=lambda: defaultdict(Amount))
    attention: dict[int, Amount] = field(default_factory=lambda: defaultdict(Amount))
    input: dict[int, Amount] = field(default_factory=lambda: defaultdict(Amount))


def trace(
    directory: Path, longest: int, products: torch.dtype, lora: LoraConfig | None = None
) -> TracedShape:
    """What the model of a directory holds and keeps; of its files config.json alone is read.

    Raises whatever its code raises where a shape depends on values, which are not there.

    Args:
        directory: Of the model.
        longest: Tokens of the longest sequence that is read: exact for that length, but for code
            that takes one token after the other.
        products: Format of products. Of experts it is bfloat16, the only one in which FakeTensorMode
            (torch 2.13) has grouped products: tensors in it are taken to grow with the format.
        lora: A low-rank adapter that is trained while the rest is frozen, which keeps less.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = build_without_values(directory, "float32")
        if any(weight.dim() == 3 and "expert" in name for name, weight in model.named_parameters()):
            products = torch.bfloat16
        _rotate_alike(model)
        cached, state = _cached(build_without_values(directory, "bfloat16"))
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 1)
    divisible = why_together(model) is None
    linear = [(name.rpartition(".")[2], module) for name, module in linear_layers(model).items()]
    whole = _numbers(model)
    largest = max(weight.numel() for weight in model.parameters())
    latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
    inside = [_numbers(module) for module in _stack(model)]
    experts = [sum(map(_numbers, find_experts(module))) for module in _stack(model)]
    with mode:
        factors = _factors_of_experts(model)
        if lora is not None:
            inject(model, lora)
        for weight in model.parameters():  # as FSDP gathers them; what else is in float32 stays
            weight.data = weight.data.to(products)
    model, needs = use_packed_attention(model)

    def memory(tokens: int, of_each: int = 1) -> _PassMemory:
        return _pass_memory(mode, model, products, needs, _packed(tokens, of_each, needs))

    few, more = (memory(tokens).operations for tokens in PROBED)
    if more > MORE * few:  # one token after the other: no chunks, so that a few tokens tell
        longest = min(longest, PROBED[-1])
    module, double, sharing = memory(longest), memory(2 * longest), memory(longest, of_each=2)

    def fitted(what: Callable[[_PassMemory], dict[int, Amount]], layer: int) -> Kept:
        return fit(what(module)[layer], what(double)[layer], what(sharing)[layer], longest)

    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    return TracedShape(
        hidden=embedding.shape[1],
        vocabulary=embedding.shape[0],
        tied=model.get_output_embeddings().weight is embedding,
        heads=heads,
        divisible=divisible,
        parameters=whole,
        largest=largest,
        stack=tuple(
            TracedLayer(
                parameters=parameters,
                experts=experts[number],
                input=fitted(lambda memory: memory.input, number),
                products=fitted(lambda memory: memory.products, number),
                attention=fitted(lambda memory: memory.attention, number),
                kept=fitted(lambda memory: memory.kept, number),
            )
            for number, parameters in enumerate(inside)
        ),
        outside=fitted(lambda memory: memory.kept, OUTSIDE),
        cached=cached,
        state=state,
        plain_cache=cached > 0 and state == 0 and not latent,
        adapter=lora is not None,
        linear=tuple((name, each.in_features + each.out_features) for name, each in linear),
        experts=factors,
    )


def _factors_of_experts(model: PreTrainedModel) -> tuple[tuple[str, int], ...]:
    """Names of the weights of experts, and the numbers in their factors of rank 1."""
    sizes = []
    for name, module in expert_weights(model).items():
        weight = module.get_parameter(name.rpartition(".")[2])
        experts, *sides = weight.shape
        sizes.append((name, experts * sum(sides)))
    return tuple(sizes)


def fit(single: Amount, double: Amount, sharing: Amount, length: int) -> Kept:
    """How memory grows, from that of three micro-batches.

    Args:
        single: Of PROMPTS sequences of `length` tokens, each with a prompt of its own.
        double: Of as many that are twice as long.
        sharing: Of twice as many of `length`, of which two each begin with the same half.
    """

    def parts(*seen: float) -> tuple[float, float, float]:
        first, second, shared = (each / PROMPTS for each in seen)
        pair = max(0.0, (second - 2 * first) / (2 * length**2))
        each = first / length - pair * length
        token = min(max(0.0, (2 * first - shared) / (length // 2)), each)
        return token, each - token, pair

    numbers = parts(single.numbers, double.numbers, sharing.numbers)
    others = parts(single.others, double.others, sharing.others)
    token, slot, pair = (Amount(*both) for both in zip(numbers, others, strict=True))
    return Kept(token=token, slot=slot, pair=pair)


def _packed(length: int, of_each: int, needs: RowNeeds) -> PackedBatch:
    """Sequences of `length` tokens that are read, so many of each of two prompts, half as long."""
    prompts = [np.full(length // 2, number) for number in range(PROMPTS) for _ in range(of_each)]
    responses = [np.full(length - len(prompt) + 1, n) for n, prompt in enumerate(prompts)]
    return pack(prompts, responses, needs=needs)


def _pass_memory(
    mode: FakeTensorMode,
    model: PreTrainedModel,
    products: torch.dtype,
    needs: RowNeeds,
    packed: PackedBatch,
) -> _PassMemory:
    """What a forward pass of a micro-batch keeps."""
    amounts, layer, counted = _PassMemory(), [OUTSIDE], {}

    def add(to: dict[int, Amount], size: int, dtype: torch.dtype) -> None:
        before = to[layer[0]]
        if dtype == products:
            to[layer[0]] = Amount(before.numbers + size / products.itemsize, before.others)
        else:
            to[layer[0]] = Amount(before.numbers, before.others + size)

    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and storage._cdata not in counted:
            counted[storage._cdata] = storage  # so that no other one gets its number
            add(amounts.kept, storage.nbytes(), tensor.dtype)
        return tensor

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            amounts.operations += 1
            if is_product(func):
                results = result if isinstance(result, tuple) else (result,)
                tensors = [each for each in results if isinstance(each, Tensor)]
                for tensor in tensors:
                    add(amounts.products, tensor.numel() * tensor.element_size(), tensor.dtype)
                if "attention" in func.name():
                    first = tensors[0]
                    add(amounts.attention, first.numel() * first.element_size(), first.dtype)
            return result

    def enter(number: int, inputs: tuple[Any, ...]) -> None:
        layer[0] = number
        add(amounts.input, inputs[0].numel() * inputs[0].element_size(), inputs[0].dtype)

    model.eval()  # in training OPT drops layers by chance, which are never dropped here
    with (
        mode,
        _layers_noted(model, enter, lambda: layer.__setitem__(0, OUTSIDE)),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        Products(),
    ):
        decoder = model.get_decoder()
        decoder_states(decoder, packed, packed.predictors, ALONE, needs.whole)
    return amounts


@contextmanager
def _layers_noted(
    model: PreTrainedModel,
    enter: Callable[[int, tuple[Any, ...]], None],
    leave: Callable[[], None],
) -> Iterator[None]:
    """Tell of each decoder layer that begins, with its number, and that has ended."""
    hooks = []
    for number, layer in enumerate(_stack(model)):

        def before(_: nn.Module, inputs: tuple[Any, ...], number: int = number) -> None:
            enter(number, inputs)

        hooks.append(layer.register_forward_pre_hook(before))
        hooks.append(layer.register_forward_hook(lambda *_: leave()))
    yield
    for hook in hooks:
        hook.remove()


def _stack(model: PreTrainedModel) -> list[nn.Module]:
    return list(layers(model.get_decoder()))


def _numbers(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _rotate_alike(model: PreTrainedModel) -> None:
    """Have all positions one table: which one, of two (longrope), depends on values."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.rope_type = "default"  # type: ignore[assignment]


@torch.no_grad()
def _cached(model: PreTrainedModel) -> tuple[int, int]:
    """Numbers that decoding keeps of a token, and of a sequence besides; by two sequences."""
    sizes = []
    for length in DECODED:
        _rotate_alike(model)
        tokens = torch.zeros(1, length, dtype=torch.int64)
        output = model.eval().get_decoder()(input_ids=tokens, use_cache=True)
        besides = {name: each for name, each in output.items() if name != "last_hidden_state"}
        counts = {id(tensor): tensor.numel() for tensor in _tensors(besides, set())}
        sizes.append(sum(counts.values()))
    token = (sizes[1] - sizes[0]) // (DECODED[1] - DECODED[0])
    return token, sizes[0] - token * DECODED[0]


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All with numbers that an object holds, or what it holds in turn."""
    if isinstance(value, Tensor):
        if value.is_floating_point():  # counters of positions are not
            yield value
    elif id(value) not in seen:
        seen.add(id(value))
        parts = value.values() if isinstance(value, dict) else value
        if not isinstance(value, dict | list | tuple):
            parts = vars(value).values() if hasattr(value, "__dict__") else ()
        for part in parts:
            yield from _tensors(part, seen)


def main() -> None:
    """Print what is seen of what the arguments name."""
    warnings.filterwarnings("ignore")
    directory, longest, products, *settings = sys.argv[1:]
    lora = LoraConfig.model_validate_json(settings[0]) if settings else None
    shape = trace(Path(directory), int(longest), getattr(torch, products), lora)
    print(json.dumps(shape.to_json()))


if __name__ == "__main__":
    main()
