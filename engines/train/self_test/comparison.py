"""A model by the train engine beside the same model by transformers' own forward pass.

Log-probs of some samples, packed and each alone, and their gradients; float32 on a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, PreTrainedModel

from engines.train.activations import checkpoint_layers
from engines.train.batching.packed_batch import pack
from engines.train.model.attention import PACKED, packed_attention
from engines.train.model.fsdp import layers
from engines.train.model.sequence_parallel import ALONE
from engines.train.policy import Policy

Samples = list[tuple[Tensor, Tensor]]  # prompt and response, int64 each

TOLERANCE = 1e-4  # nats; of gradients the share of the largest one
SURE = 10.0  # times what rounding does: more is none
MOST = 0.02  # nats of tolerance with which a model still counts as tested; of gradients the share
_NO_MIXER = re.compile(r"norm|mlp|moe|expert|dropout|feed_?forward|ffn|linear$|identity", re.I)


class Unpacked(Exception):
    """The model cannot take packed samples; why, as a clause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """Of the train engine's numbers from those of transformers; the largest of each kind."""

    alone: float  # nats, of log-probs of samples each by itself
    packed: float  # nats, of log-probs of all samples in one row
    in_evaluation: float  # nats, as `alone`, of the model as it is where nothing is dropped
    gradients: float  # of the packed samples, as a share of the largest gradient
    selective: float  # as `gradients`, from those with train.recompute = selective
    tolerance: float  # nats
    tolerance_of_gradients: float  # as a share; as `tolerance`, or more where rounding moves them
    without_attention: tuple[str, ...]  # classes of layers that called no packed attention

    @property
    def largest(self) -> float:
        """Of the log-probs, in nats."""
        return max(self.alone, self.packed)

    @property
    def none(self) -> bool:
        """Whether both compute the same."""
        within = self.gradients <= self.tolerance_of_gradients  # NaN: not
        return self.largest <= self.tolerance and within


def own_logprobs(model: PreTrainedModel, samples: Samples) -> list[Tensor]:
    """Log-probs [R] of each sample's response by the model's own forward pass, in nats."""
    logprobs = []
    for prompt, response in samples:
        tokens = torch.cat([prompt, response])
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        table = logits.float().log_softmax(-1)
        logprobs.append(table.gather(-1, response[:, None])[:, 0])
    return logprobs


@torch.no_grad()
def rounding(model: PreTrainedModel, samples: Samples) -> float:
    """By how much log-probs change, in nats, where embeddings do by a float32's last digit."""
    before = own_logprobs(model.eval(), samples)
    with _moved(model):
        after = own_logprobs(model, samples)
    return _largest(after, before)


@contextmanager
def _moved(model: PreTrainedModel) -> Iterator[None]:
    """With embeddings that differ by a float32's last digit."""
    table = model.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    before = table.detach().clone()
    with torch.no_grad():
        table.mul_(1 + 2e-7)
    yield
    with torch.no_grad():
        table.copy_(before)


def packed_logprobs(
    policy: Policy, samples: Samples, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The same by the train engine, of all samples in one row."""
    prompts, responses = ([each.numpy() for each in some] for some in zip(*samples, strict=True))
    packed = pack(prompts, responses, needs=policy.needs)
    logprobs, *_ = policy(packed, ALONE, temperature=1.0, chunk=1024, dtype=dtype)
    return list(logprobs.split([len(response) for _, response in samples]))


def differences(
    model: PreTrainedModel, samples: Samples, tolerance: float = TOLERANCE
) -> Differences:
    """How the train engine differs; the model is a policy from then on.

    Gradients are not compared where log-probs differ already. Raises whatever code of models does.
    """
    attention = model.config._attn_implementation
    with torch.no_grad():
        logprobs = own_logprobs(model.eval(), samples)
    policy = Policy(model).train()  # as the engine does: what models do in training only counts
    called: set[int] = set()

    def noted(module: nn.Module, *inputs: Tensor, **keywords: object) -> tuple[Tensor, None]:
        called.add(id(module))
        return packed_attention(module, *inputs, **keywords)  # type: ignore[arg-type]

    AttentionInterface.register(PACKED, noted)
    try:
        with torch.no_grad():
            alone = [packed_logprobs(policy, [sample])[0] for sample in samples]
            packed = packed_logprobs(policy, samples)
            policy.eval()
            still = [packed_logprobs(policy, [sample])[0] for sample in samples]
            policy.train()
    except TypeError as error:
        if "packed_layout" in str(error):
            raise Unpacked(
                "its layers do not hand on to attention which tokens are of one sample"
            ) from error
        raise
    finally:
        AttentionInterface.register(PACKED, packed_attention)
    largest = _largest(alone, logprobs), _largest(packed, logprobs)
    gradients, selective, allowed = float("nan"), 0.0, tolerance
    if max(largest) <= tolerance:
        ours = _gradients(model, packed_logprobs(policy, samples))
        selective = _selectively(policy, samples, ours)
        model.set_attn_implementation(attention)
        theirs = _gradients(model, own_logprobs(model.eval(), samples))
        gradients = _largest_share(ours, theirs)
        if gradients > tolerance:  # which a threshold may be the cause of, such as Gemma 3n's
            with _moved(model):
                moved = _gradients(model, own_logprobs(model, samples))
            allowed = min(MOST, max(tolerance, SURE * _largest_share(moved, theirs)))
    return Differences(
        alone=largest[0],
        packed=largest[1],
        in_evaluation=_largest(still, logprobs),
        gradients=gradients,
        selective=selective,
        tolerance=tolerance,
        tolerance_of_gradients=allowed,
        without_attention=_without_attention(model, called),
    )


def unrounded(model: PreTrainedModel, samples: Samples) -> str | None:
    """Why a policy's products cannot be in bfloat16; None: they can. Its weights are, afterwards.

    As FSDP has it: weights are gathered in that format and layers get their inputs in it, buffers
    stay as they are.
    """
    policy = Policy(model)
    for weight in policy.parameters():
        weight.data = weight.data.bfloat16()
    for layer in layers(model.get_decoder()):
        layer.register_forward_pre_hook(_rounded, with_kwargs=True)
    try:
        torch.cat(packed_logprobs(policy, samples, torch.bfloat16)).sum().backward()
    except RuntimeError as error:
        text = " ".join(str(error).split())[:160]
        # Others are of kernels that take no widths as small as the twin's.
        return text if "dtype" in text or "scalar type" in text else None
    return None


def _rounded(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """A layer's inputs in bfloat16, where they are numbers of another format."""

    def cast(value: object) -> object:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.bfloat16()
        return value

    return tree_map(cast, (inputs, keywords))


def _selectively(policy: Policy, samples: Samples, expected: dict[str, Tensor]) -> float:
    """By how much gradients differ where layers keep their products: some change these in place."""
    try:
        checkpoint_layers(policy.model, 1.0, "selective")
        gradients = _gradients(policy.model, packed_logprobs(policy, samples))
    except (RuntimeError, ValueError):  # torch and transformers say that it cannot be
        return float("inf")
    finally:
        policy.model.gradient_checkpointing_disable()
    return _largest_share(gradients, expected)


def _gradients(model: PreTrainedModel, logprobs: list[Tensor]) -> dict[str, Tensor]:
    """Of a sum of all log-probs, each with a factor of its own."""
    flat = torch.cat(logprobs)
    factors = torch.randn(len(flat), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (flat * factors).sum().backward()
    return {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def _largest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return float((torch.cat(ours) - torch.cat(theirs)).abs().max())


def _largest_share(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """max |g - g'| / max |g'| over the weights; where one has no gradient, it is 0."""
    most = max(float(gradient.abs().max()) for gradient in theirs.values())
    shares = [0.0]
    for name in ours.keys() | theirs.keys():
        ours_at, theirs_at = ours.get(name), theirs.get(name)
        if ours_at is None or theirs_at is None:  # untouched by one: then zero by the other
            either = ours_at if theirs_at is None else theirs_at
            assert either is not None
            shares.append(float(either.abs().max()) / most)
            continue
        scale = max(float(theirs_at.abs().max()), 0.01 * most)
        shares.append(float((ours_at - theirs_at).abs().max()) / scale)
    return max(shares) if all(share == share for share in shares) else float("nan")


def _without_attention(model: PreTrainedModel, called: set[int]) -> tuple[str, ...]:
    """Of each layer in which no module called the packed attention, what may mix its tokens."""
    modules = set()
    for layer in layers(model.get_decoder()):
        if not any(id(module) in called for module in layer.modules()):
            modules |= {
                type(child).__name__
                for child in layer.children()
                if not _NO_MIXER.search(type(child).__name__)
            } or {type(layer).__name__}
    return tuple(sorted(modules))
