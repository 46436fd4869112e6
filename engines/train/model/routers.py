"""Routers in training: what they chose in a forward pass, and how evenly; in float32 by setting.

Which modules they are is in engines/models/routers.py. They are watched from outside: their logits
[T, E] of T tokens and E experts, and the k experts that each token goes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from engines.algorithms.aggregation import MetricSums, mean_over
from engines.models.routers import ChosenExperts, Returned, Router, on_meta
from engines.train.model.attention import AttentionLayout, collapse
from engines.train.model.fsdp import own_part


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """What the routers did in a forward pass, by layer."""

    logits: list[Tensor] = field(default_factory=list)  # each [T, E], with gradient
    chosen: list[Tensor] = field(default_factory=list)  # each [T, k] int64

    def of_tokens(self, tokens: int, layout: AttentionLayout) -> Routing:
        """Of the T tokens of a packed row, where layers were given padded rows of sequences."""
        if all(len(logits) == tokens for logits in self.logits):
            return self
        return Routing(
            logits=[collapse(logits, layout) for logits in self.logits],
            chosen=[collapse(chosen, layout) for chosen in self.chosen],
        )


@contextmanager
def watched(routers: Sequence[Router]) -> Iterator[Routing]:
    """What the routers of all layers do in the forward pass in the body, once it has ended.

    Tensors are kept and nothing is computed: layers may be computed again in the backward pass, where
    each operation of the forward pass must come again.
    """
    routing = Routing()

    def see(router: Router, returned: Returned) -> None:
        parts = (returned,) if isinstance(returned, Tensor) else returned
        logits = parts[min(router.index, len(parts) - 1)].flatten(0, -2)
        chosen = next((part for part in parts if _are_choices(part, router.top_k)), None)
        if chosen is None:
            chosen = logits.detach().topk(router.top_k).indices
        routing.logits.append(logits)
        routing.chosen.append(chosen.flatten(0, -2))

    with ExitStack() as hooks:
        for router in routers:
            hook = router.module.register_forward_hook(
                lambda _, inputs, outputs, router=router: see(router, outputs)
            )
            hooks.callback(hook.remove)
        yield routing


def _are_choices(value: object, top_k: int) -> bool:
    if not isinstance(value, Tensor) or value.dtype != torch.int64:
        return False
    return value.dim() > 1 and value.shape[-1] == top_k


def compute_in_float32(routers: Sequence[Router], hidden: int, compute: torch.dtype) -> None:
    """Have routers multiply in float32, in place, whatever their weights and states are in.

    What the experts' results are multiplied by has the number format that it had before.

    Args:
        routers: Of a model on the meta device or not.
        hidden: Numbers of a token's state.
        compute: In what layers multiply.

    Raises ValueError for routers of a form that is not known.
    """
    for router in routers:
        module = router.module
        returned = on_meta(router, hidden, compute)
        if returned is None:
            raise ValueError(
                "train.router_dtype = float32, and this model's routers are of a form that is not "
                "known. Set train.router_dtype = compute."
            )
        parts = (returned,) if isinstance(returned, Tensor) else returned
        module.forward = _in_float32(router, module.forward, [part.dtype for part in parts])


def _in_float32(
    router: Router, forward: Callable[..., Returned], formats: Sequence[torch.dtype]
) -> Callable[..., Returned]:
    def computed(states: Tensor, *others: Any, **named: Any) -> Returned:
        with _Float32Products():
            results = forward(states.float(), *others, **named)
        if isinstance(results, Tensor):
            return results
        return tuple(
            result if place == router.index else result.to(dtype)
            for place, (result, dtype) in enumerate(zip(results, formats, strict=True))
        )

    return computed


class _Float32Products(TorchFunctionMode):
    """Linear layers' products in float32."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if function is linear:
            arguments = [
                value.float() if isinstance(value, Tensor) else value for value in arguments
            ]
        return function(*arguments, **(named or {}))


@torch.no_grad()
def move_biases(biases_by_layer: Sequence[Sequence[Tensor]], load: Tensor, rate: float) -> None:
    """Make the choice of busy experts less likely, in place, and that of the others likelier.

    Each expert's bias moves by `rate` towards an even load (arXiv:2408.15664, algorithm 1):
    b_i += rate * sign(mean of the loads - load of i).

    Args:
        held: For each layer its bias, [E] or [1, E], (sharded) as it is held, in all formats of it.
        load: Choices [layers, E] of an optimizer step, over all ranks.
        rate: The change of a score.
    """
    changes = rate * (load.mean(1, keepdim=True) - load).sign()
    for biases, change in zip(biases_by_layer, changes, strict=True):
        first, *copies = (own_part(bias) for bias in biases)
        local, begin = first
        local += change[begin : begin + local.numel()].view_as(local).to(local)
        for other, _ in copies:
            other.copy_(local)


def router_means(
    routers: Sequence[Router], routing: Routing, loss: Tensor, counts: Tensor
) -> MetricSums:
    """Means over tokens: entropy of the routers' scores, of all layers, in nats; `aux_loss`.

    counts: bool scalar, whether these tokens count.
    """
    entropies = torch.zeros(len(routing.logits[0]), device=loss.device)
    for router, logits in _by_layer(routers, routing):
        entropies += torch.special.entr(_scores(router, logits.detach())).sum(1)
    entropies /= len(routers)
    mask = counts.expand(entropies.shape)
    return MetricSums(
        means={
            "router/entropy": mean_over(entropies, mask),
            "router/aux_loss": mean_over(loss.expand_as(entropies), mask),
        }
    )


def replay_metrics(replay: ChosenExperts, layout: AttentionLayout, mask: Tensor) -> MetricSums:
    """`router/mismatch`: of the experts that tokens were sampled with, those not chosen here.

    Their mean share over the tokens of which they are known, in all layers. mask: bool [R] of the
    micro-batch's response tokens; without any no token counts.
    """
    chosen = torch.stack(replay.own, 1)  # [T, L, k]
    ids = torch.full_like(chosen, -1)
    if replay.told is not None:
        ids = replay.told.to(chosen)
        if replay.slots is not None:
            chosen = collapse(chosen.flatten(1), layout).view_as(ids)
    there = (ids[..., None] == chosen[..., None, :]).any(-1)
    counted = (ids >= 0).all(2).all(1) & mask.any()
    return MetricSums(
        means={"router/mismatch": mean_over(1 - there.float().mean((1, 2)), counted)},
    )


def load_of(routing: Routing) -> Tensor:
    """How many choices fell on each expert, float64 [layers, E]."""
    experts = max(logits.shape[1] for logits in routing.logits)
    return torch.stack([_counts(chosen, experts) for chosen in routing.chosen]).double()


def _counts(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen, int64 [E]; `bincount` would wait for the device."""
    ids = chosen.flatten()
    return ids.new_zeros(experts).scatter_add_(0, ids, torch.ones_like(ids))


def load_metrics(load: Tensor) -> dict[str, float]:
    """Of the choices [layers, E] that an update made, over all ranks.

    `router/busiest_share`: the share that the busiest expert of a layer has, the largest of all
    layers; evenly it is 1 / E. `router/idle_experts`: the share of experts that no token went to.
    """
    shares = load / load.sum(1, keepdim=True).clamp(min=1)
    return {
        "router/busiest_share": float(shares.max()),
        "router/idle_experts": float((load == 0).double().mean()),
    }


def aux_loss(routers: Sequence[Router], routing: Routing) -> Tensor:
    """The load-balancing loss of T tokens, the mean of the layers; scalar with gradient.

    With f_i the share of the tokens that go to expert i and P_i the mean of its scores:
    E * sum_i f_i P_i, which is k where all experts have equally much (Switch Transformer,
    arXiv:2101.03961, equation 4, for k experts a token; transformers' `load_balancing_loss_func` of
    one layer). Scores that are sigmoids are divided by their sum (DeepSeek-V3, arXiv:2412.19437,
    equations 17 to 20).
    """
    losses = []
    for (router, logits), chosen in zip(_by_layer(routers, routing), routing.chosen, strict=True):
        tokens, experts = logits.shape
        load = _counts(chosen, experts)
        losses.append(experts * (load / tokens * _scores(router, logits).mean(0)).sum())
    return torch.stack(losses).mean()


def _by_layer(routers: Sequence[Router], routing: Routing) -> list[tuple[Router, Tensor]]:
    return list(zip(routers, routing.logits, strict=True))


def _scores(router: Router, logits: Tensor) -> Tensor:
    """Each token's scores of the experts, float32 [T, E], which add up to 1."""
    if not router.sigmoid:
        return logits.float().softmax(1)
    scores = logits.float().sigmoid()
    return scores / scores.sum(1, keepdim=True)
