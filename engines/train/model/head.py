"""The output head of a language model as its own forward pass applies it.

With the last hidden states h: logits = cap tanh((scale h W^T + bias) / cap), where most models have
no cap, no bias and the scale 1. Granite divides logits, Cohere multiplies them, MiniCPM3 divides the
states, Gemma caps, Phi adds a bias. Which of it a model does is not known by names: its forward pass
is run with its decoder and its head replaced, so that what it does to their numbers is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

# States that are sent through a model's forward pass, with both signs: from where a cap does nothing
# to where it is all.
_STATES = (1e-8, 1e-2, 0.5, 1.0, 3.0, 10.0, 30.0, 100.0, 1e3, 1e4, 1e8)
_CLOSE = 1e-5  # relative; some models compute logits in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadForm:
    """What a model does around the product of its head: c tanh(b ((a h) W^T + bias) / c)."""

    before: float = 1.0  # a, factor on hidden states
    after: float = 1.0  # b, factor on the product and its bias
    cap: float | None = None  # c, largest absolute logit; None: no cap


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """An output head: logits = cap tanh(scale (h W^T + bias) / cap).

    Example: Gemma 2's has cap=30.0, Granite's with logits_scaling = 8 has scale=0.125.
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0  # factor on product and bias
    cap: float | None = None  # largest absolute logit; None: no cap

    @classmethod
    def of(cls, linear: nn.Module, form: HeadForm) -> Head:
        """With the weights of a model's head as they are now; FSDP puts others in their place."""
        assert isinstance(linear, nn.Linear)
        weight: Tensor = linear.weight
        bias: Tensor | None = linear.bias
        if bias is not None and form.before != 1:
            bias = bias / form.before
        return cls(weight=weight, bias=bias, scale=form.before * form.after, cap=form.cap)

    def words(self, first: int, stop: int) -> Head:
        """That of some words of the vocabulary alone."""
        bias = None if self.bias is None else self.bias[first:stop]
        return Head(weight=self.weight[first:stop], bias=bias, scale=self.scale, cap=self.cap)


@torch.no_grad()
def head_form(model: PreTrainedModel) -> HeadForm:
    """What a causal language model does to hidden states and logits, by its own forward pass.

    The model may be on the meta device: none of its weights are used.

    Raises ValueError where logits are no such function of the last hidden states.
    """
    linear = model.get_output_embeddings()
    if model.get_decoder() in (model, linear):
        raise ValueError(
            f"{type(model).__name__} does not say which part of it is the decoder, which the train "
            "engine needs. Set model.path to another model."
        )
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has no linear output head, which the train engine needs. Set "
            "model.path to another model."
        )
    states = torch.tensor([sign * x for x in _STATES for sign in (1, -1)], dtype=torch.float64)
    inputs: list[Tensor] = []

    def head(hidden: Tensor) -> Tensor:
        inputs.append(hidden)
        return hidden

    def decoder(*_: object, **__: object) -> _States:
        return _States(last_hidden_state=states[None, :, None])  # type: ignore[arg-type]

    with _replaced(model.get_decoder(), decoder), _replaced(linear, head):
        tokens = torch.zeros(1, len(states), dtype=torch.int64)
        try:
            logits = model(input_ids=tokens, use_cache=False).logits
        except RuntimeError as error:  # of layers of its own that take other states than these
            raise ValueError(_unknown(model)) from error
    probe = inputs[0].double().flatten() if len(inputs) == 1 else states[:0]
    logits = logits.double().flatten()
    if probe.shape != states.shape or logits.shape != states.shape:
        raise ValueError(_unknown(model))
    before, after = _factor(states, probe), _factor(probe, logits)
    top = float(logits.abs().max())
    uncapped = float((after * probe).abs().max())
    cap = None if top > 0.99 * uncapped else _rounded(top)
    form = HeadForm(before=before, after=after, cap=cap)
    outputs = after * probe if form.cap is None else form.cap * (after * probe / form.cap).tanh()
    for computed, expected in ((probe, before * states), (logits, outputs)):
        if before * after <= 0 or not torch.allclose(computed, expected, rtol=_CLOSE, atol=1e-9):
            raise ValueError(_unknown(model))
    return form


def _factor(inputs: Tensor, computed: Tensor) -> float:
    """By what numbers are multiplied where they are smallest; 1 exactly where nothing is done."""
    if computed.equal(inputs) or computed.equal(inputs.float().double()):
        return 1.0
    return _rounded(float(computed[0] / inputs[0]))


def _rounded(number: float) -> float:
    """To so many digits that 30 is 30, and 1 is 1."""
    short = float(f"{number:.6g}")
    return short if math.isclose(short, number, rel_tol=1e-9) else number


class _States(BaseModelOutputWithPast):
    """What a decoder gives; models ask their own for more, such as the loss of routers."""

    def __getattr__(self, name: str) -> None:
        return None


def _unknown(model: PreTrainedModel) -> str:
    return (
        f"{type(model).__name__} computes logits by more than a product with its output head, a "
        "factor and a soft cap, which the train engine does not. Set model.path to another model."
    )


@contextmanager
def _replaced(module: nn.Module, forward: object) -> Iterator[None]:
    """Within it a module's forward pass is another function."""
    assert "forward" not in vars(module)
    module.forward = forward  # type: ignore[assignment]
    try:
        yield
    finally:
        del module.forward
