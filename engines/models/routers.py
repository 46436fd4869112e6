"""Routers and experts of a mixture: which modules they are, and which experts routers choose.

transformers says of each model which modules its routers are, for its own load-balancing loss. Each
takes the k largest of its scores by one call of `torch.topk`, where the choice is seen, and told.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from engines.models.checkpoints import is_score_bias
from engines.models.routed_experts import RoutedExperts, no_tokens

Returned: TypeAlias = Tensor | tuple[Tensor, ...]  # of a router


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """One layer's."""

    module: nn.Module
    layer: int  # number of the decoder's layer
    index: int  # of the logits among what it returns
    top_k: int  # experts of a token
    sigmoid: bool  # scores are sigmoids of the logits, not their softmax
    # The model's name of what is added to scores for the choice alone; empty: nothing.
    bias: str = ""


def find_routers(model: PreTrainedModel) -> tuple[Router, ...]:
    """The routers of a language model, by layer; empty where it has none of a form that is known."""
    text = model.config.get_text_config()
    top_k = getattr(text, "num_experts_per_tok", None)
    if not top_k:
        return ()
    recorders = [
        recorder
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
        if isinstance(
            recorder := (part._can_record_outputs or {}).get("router_logits"), OutputRecorder
        )
    ]  # several at once, which JetMoE has, are of no form that is known
    return tuple(
        Router(
            module=module,
            layer=_layer(name),
            index=index,
            top_k=top_k,
            sigmoid=_score(text, module) == "sigmoid",
            bias=_bias(model, name),
        )
        for name, module in model.named_modules()
        if (index := _index(name, module, recorders)) is not None and _score(text, module)
    )


def find_experts(model: nn.Module) -> tuple[nn.Module, ...]:
    """The experts of each layer that transformers holds in one stack, each weight [E, …].

    Its `use_experts_implementation` marks them: called with states [T, H], the k chosen experts
    [T, k] of each token and their gates [T, k], they give [T, H].
    """
    return tuple(part for part in model.modules() if are_experts(part))


def are_experts(module: nn.Module) -> bool:
    """Whether transformers holds experts in it as stacks, of which it has grouped products."""
    return {"has_gate", "is_transposed"} <= vars(module).keys()


def count_experts(experts: nn.Module) -> int:
    """E."""
    return len(next(experts.parameters()))


def _layer(name: str) -> int:
    """Of a module's name, such as model.layers.3.mlp.gate."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def _bias(model: PreTrainedModel, router: str) -> str:
    """The name of the bias in a router, or in the block around it, that no gradient changes."""
    block = f"{router.rpartition('.')[0]}."
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    fixed = (name for name in model.state_dict() if name not in trained)
    return next((name for name in fixed if name.startswith(block) and is_score_bias(name)), "")


def _index(name: str, module: nn.Module, recorders: Sequence[OutputRecorder]) -> int | None:
    for recorder in recorders:
        place = recorder.layer_name is None or f".{recorder.layer_name}" in f".{name}"
        if place and isinstance(module, recorder.target_class):
            return recorder.index
    return None


def _score(config: PretrainedConfig, module: nn.Module) -> str:
    """The function that makes scores of a router's logits; empty: it is not known."""
    names = ("scoring_func", "expert_selection_fn")
    function = next((x for name in names if (x := getattr(config, name, None)) is not None), None)
    if function is not None:
        return function if function in ("softmax", "sigmoid") else ""
    return "sigmoid" if "sigmoid" in inspect.getsource(type(module)) else "softmax"


def on_meta(router: Router, hidden: int, dtype: torch.dtype) -> Returned | None:
    """What a router would return of a token whose state has so many numbers, of that format.

    What it is handed besides is a bias of the experts' scores. None: it is handed something else.
    """
    return _of_one_token(_twin(router, "meta", dtype), hidden)


def _twin(router: Router, device: str, dtype: torch.dtype) -> nn.Module:
    """A router of the same kind and sizes, whose values are not set."""
    twin = copy.deepcopy(router.module)
    vars(twin).pop("forward", None)  # that of the module, where it was put in the place of its own
    return twin.to(dtype=dtype).to_empty(device=device)


def _of_one_token(router: nn.Module, hidden: int) -> Returned | None:
    weight = next(parameter for parameter in router.parameters() if parameter.dim() == 2)
    _, *arguments = inspect.signature(router.forward).parameters.values()
    biases = [
        weight.new_zeros(len(weight))
        for argument in arguments
        if argument.default is argument.empty
    ]
    for shape in ((1, hidden), (1, 1, hidden)):  # some take tokens, some sequences of them
        try:
            returned: Returned = router(weight.new_ones(shape), *biases)
        except (ValueError, IndexError, RuntimeError):
            continue
        return returned
    return None


def number_of_experts(router: Router, hidden: int) -> int | None:
    """Among which a router chooses; None where its choice is of no form that can be told.

    hidden: numbers of a token's state.
    """
    with _Choice(router, None) as choice:
        returned = on_meta(router, hidden, torch.float32)
    if returned is None:
        return None
    logits = returned if isinstance(returned, Tensor) else returned[router.index]
    experts = int(logits.shape[-1])
    chooses = choice.widths.count(experts) == 1
    return experts if chooses and _weighs_any(router, hidden, experts) else None


@torch.no_grad()
def _weighs_any(router: Router, hidden: int, experts: int) -> bool:
    """Whether each expert that a router may be told has a gate.

    Some set the scores of all groups of experts but the best ones to 0, and take gates of these.
    """
    twin = _twin(router, "cpu", torch.float32)
    noise = torch.Generator().manual_seed(0)
    for tensor in (*twin.parameters(), *twin.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=noise) / hidden**0.5)
    for first in range(0, experts, router.top_k):
        told = (first + torch.arange(router.top_k)).remainder(experts)[None]
        with _Choice(router, told, None, experts):
            returned = _of_one_token(twin, hidden)
        parts = (returned,) if isinstance(returned, Tensor) else returned or ()
        gates = [
            part for part in parts if part.is_floating_point() and part.shape[-1] == router.top_k
        ]
        if any(bool((gate == 0).any()) for gate in gates):
            return False
    return True


class ChosenExperts:
    """What the routers of a model choose in its forward passes, and what they are told to choose.

    A router that is told takes the given experts, each with the score that it gives itself, from
    which it makes their weights as it does for its own choice.
    """

    def __init__(self, routers: Sequence[Router], hidden: int) -> None:
        """Puts itself between the routers and their model.

        hidden: numbers of a token's state. Raises ValueError where their choice cannot be told.
        """
        counts = {number_of_experts(router, hidden) for router in routers}
        if len(counts) != 1 or None in counts:
            raise ValueError(
                "train.router_replay = true is for mixtures of experts, and this model has no "
                "routers of a form that is known. Set train.router_replay = false."
            )
        self.experts = sum(count for count in counts if count is not None)
        self.layers, self.top_k = len(routers), routers[0].top_k
        self.places = [router.layer for router in routers]
        self.tell(None)
        self.chosen: list[Tensor] = [torch.empty(0)] * self.layers  # [T, k] of the last pass
        self.own: list[Tensor] = [torch.empty(0)] * self.layers  # as they were not told
        for number, router in enumerate(routers):
            module = router.module
            module.forward = self._seen(number, router, module.forward)

    def tell(self, experts: Tensor | None, slots: Tensor | None = None) -> None:
        """What routers choose from now on, also where layers are computed again.

        Args:
            experts: [T, L, k] int16 ids of the T tokens that are computed, -1: a router's own choice.
                None: all choices are the routers' own.
            slots: int64, the token in each place, where layers are given tokens in others.
        """
        self.told, self.slots = experts, slots

    @property
    def of_no_token(self) -> RoutedExperts:
        """[0, L, k]"""
        return no_tokens(self.layers, self.top_k, self.experts)

    def _seen(
        self, number: int, router: Router, forward: Callable[..., Returned]
    ) -> Callable[..., Returned]:
        def routed(*states: Any, **named: Any) -> Returned:
            told = None if self.told is None else self.told[:, number]
            with _Choice(router, told, self.slots, self.experts) as choice:
                returned = forward(*states, **named)
            self.own[number], self.chosen[number] = choice.own, choice.chosen
            return returned

        return routed


def chosen_experts(model: PreTrainedModel) -> ChosenExperts:
    """Of a model's routers; ValueError where it has none whose choice can be told."""
    return ChosenExperts(find_routers(model), model.config.get_text_config().hidden_size)


_TOPK = (torch.topk, Tensor.topk)


class _Choice(TorchFunctionMode):
    """The choice of a router, in whose forward pass it is entered."""

    def __init__(
        self,
        router: Router,
        told: Tensor | None,
        slots: Tensor | None = None,
        experts: int | None = None,
    ) -> None:
        super().__init__()
        self._router, self._told, self._slots, self._experts = router, told, slots, experts
        self.widths: list[int] = []  # among how many the k largest were taken, by each call
        self.own = self.chosen = torch.empty(0)  # [T, k] int64

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        returned = function(*arguments, **(named or {}))
        if function not in _TOPK or returned.indices.shape[-1] != self._router.top_k:
            return returned
        scores = arguments[0]
        if scores.dim() != 2 or self._experts not in (None, scores.shape[1]):
            return returned  # within groups of experts, or of groups
        self.widths.append(int(scores.shape[1]))
        self.own = self.chosen = returned.indices
        if self._told is None:
            return returned
        told = self._told
        if self._slots is not None:
            told = told[self._slots[: len(self.own)]]
        assert len(told) == len(self.own), "layers are given the tokens, or these in places"
        told = told.to(self.own.dtype)
        self.chosen = torch.where((told >= 0).all(1, keepdim=True), told, self.own)
        return torch.return_types.topk((scores.gather(1, self.chosen), self.chosen))
