"""Log-probs and entropy of tokens from hidden states; no [T, V] tensor is ever held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CACHED_LOGITS = 2**22  # at most held at once on a CPU: 16 MiB, which its cache holds


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStatistics:
    """Of the policy's distribution pi at each token; float32.

    Example: one token, two words of probability 3/4 and 1/4, the label is the first
        TokenStatistics(logprobs=[-0.2877], entropy=[0.5623], sum_pi_squared=[0.625])
    """

    logprobs: Tensor  # [T] log pi(label), nats; with gradient
    entropy: Tensor  # [T] nats; with gradient when asked for
    sum_pi_squared: (
        Tensor | None
    )  # [T] sum over the words of pi^2, no gradient; None: not asked for


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy_gradient: bool = False,
    squared: bool = False,
) -> TokenStatistics:
    """Log-probs and entropy of pi = softmax(hidden weight^T / temperature) at each label.

    The product runs in hidden's dtype (weight is cast, block by block), everything after in float32
    (float64 stays float64). The backward pass computes the logits anew.

    Args:
        hidden: [T, H] last hidden states.
        weight: [V, H] output head.
        labels: [T] int64, words in [0, V).
        temperature: Sampling temperature, > 0, by which logits are divided.
        chunk: At most chunk x V logits exist at once.
        entropy_gradient: Whether the entropy carries a gradient.
        squared: Whether sum_pi_squared is computed.
    """
    logprobs, entropy, squares = _TokenStatistics.apply(
        hidden, weight, labels, temperature, chunk, entropy_gradient, squared
    )
    return TokenStatistics(
        logprobs=logprobs, entropy=entropy, sum_pi_squared=squares if squared else None
    )


class _TokenStatistics(torch.autograd.Function):
    """The vocabulary is walked in blocks, all tokens at once, so that each weight is used once a pass
    and its gradient needs no sum over blocks. Sums are kept relative to the largest logit so far, z:
    s = sum exp z, t = sum z exp z; then log pi = z_y - log s and H = log s - t / s.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
        squared: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        blocks = _Blocks(hidden, weight, labels, temperature, kind, _width(hidden, weight, chunk))
        sums, products, squares, picked = torch.zeros(
            4, hidden.shape[0], dtype=kind, device=hidden.device
        ).unbind()
        peaks = torch.full_like(sums, torch.finfo(kind).min / 4)
        for start, logits in blocks:
            higher = torch.maximum(peaks, logits.amax(-1))
            fall = peaks - higher  # <= 0: what was summed so far shrinks by its exponential
            peaks = higher
            inside, columns = blocks.labels_in(start, logits.shape[1])
            picked = torch.where(inside, logits.gather(1, columns[:, None])[:, 0], picked)
            logits.sub_(peaks[:, None])
            probs = logits.exp()
            shrink = fall.exp()
            products.add_(sums * fall).mul_(shrink)
            sums.mul_(shrink).add_(probs.sum(-1))
            if squared:
                squares.mul_(shrink.square()).add_(probs.square().sum(-1))
            products.add_(logits.mul_(probs).sum(-1))
        logs = sums.log()
        logprobs, entropy = picked - peaks - logs, logs - products / sums
        ctx.save_for_backward(hidden, weight, labels, peaks, logs, entropy)
        ctx.temperature, ctx.chunk, ctx.entropy_gradient = temperature, chunk, entropy_gradient
        squares = squares / sums.square()
        ctx.mark_non_differentiable(*([squares] if entropy_gradient else [squares, entropy]))
        return logprobs, entropy, squares

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, peaks, logs, entropy = ctx.saved_tensors
        kind, width = logs.dtype, _width(hidden, weight, ctx.chunk)
        blocks = _Blocks(hidden, weight, labels, ctx.temperature, kind, width)
        grad_hidden = torch.zeros_like(hidden, dtype=kind) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        falling = grad_logprobs.neg()[:, None]
        for start, log_probs in blocks:
            log_probs.sub_(peaks[:, None]).sub_(logs[:, None])
            if ctx.entropy_gradient:  # dH / dz_j = -p_j (log p_j + H)
                slope = (log_probs + entropy[:, None]).mul_(-grad_entropy[:, None])
                grad = log_probs.exp_().mul_(slope.add_(falling))
            else:  # d log pi / dz_j = [j = y] - p_j
                grad = log_probs.exp_().mul_(falling)
            inside, columns = blocks.labels_in(start, grad.shape[1])
            grad.scatter_add_(1, columns[:, None], torch.where(inside, grad_logprobs, 0)[:, None])
            if ctx.temperature != 1:
                grad.div_(ctx.temperature)
            cast = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += cast @ blocks.weight_at(start)
            if grad_weight is not None:
                grad_weight[start : start + grad.shape[1]] = cast.t() @ hidden
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Logits of all tokens for one block of the vocabulary after the other."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: float
    kind: torch.dtype
    width: int  # words of a block

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """The first word of each block, and its logits [T, words], which the caller may change."""
        for start in range(0, self.weight.shape[0], self.width):
            logits = (self.hidden @ self.weight_at(start).t()).to(self.kind)
            if self.temperature != 1:
                logits.div_(self.temperature)
            # -inf (a word that cannot be) becomes the least number, whose probability is 0.
            yield start, logits.clamp_(min=torch.finfo(self.kind).min / 4)

    def weight_at(self, start: int) -> Tensor:
        """The block's rows of the output head, in the dtype of the product."""
        return self.weight[start : start + self.width].to(self.hidden.dtype)

    def labels_in(self, start: int, words: int) -> tuple[Tensor, Tensor]:
        """Whether each token's label is in the block, bool [T], and where in it; 0 where it is not.

        Without asking a device how many there are, which would wait for it.
        """
        inside = (self.labels >= start) & (self.labels < start + words)
        return inside, torch.where(inside, self.labels - start, 0)


def _width(hidden: Tensor, weight: Tensor, chunk: int) -> int:
    """Words of a block: chunk x V logits in all, on a CPU no more than its cache holds."""
    logits = chunk * weight.shape[0]
    if hidden.device.type == "cpu":
        logits = min(logits, CACHED_LOGITS)
    return max(1, min(weight.shape[0], logits // max(hidden.shape[0], 1)))
