"""Log-probs and entropy of tokens from hidden states, in chunks: no [T, V] tensor is ever held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStatistics:
    """Figures of the policy's distribution at each token, float32."""

    logprobs: Tensor  # [T] log pi(label), nats; with gradient
    entropy: Tensor  # [T] nats; with gradient when asked for
    sum_pi_squared: (
        Tensor | None
    )  # [T] sum over the vocabulary of pi^2, no gradient; when asked for


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
    """Log-probs [T] of labels [T] under softmax(hidden [T, H] weight^T [V, H] / temperature).

    The product runs in hidden's dtype, everything after in float32 (float64 stays float64). At most
    `chunk` x V logits exist at once, in the backward pass too, which computes them anew.
    """
    logprobs, entropy, squares = _TokenStatistics.apply(
        hidden, weight, labels, temperature, chunk, entropy_gradient, squared
    )
    return TokenStatistics(
        logprobs=logprobs, entropy=entropy, sum_pi_squared=squares if squared else None
    )


class _TokenStatistics(torch.autograd.Function):
    """With z the logits less their largest, s = log sum exp z, p = exp(z - s): log pi = z_y - s,
    H = s - sum p z. The largest is kept apart from s, so that large logits cost no digits.
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
        logprobs, entropy, squares, peaks, sums = torch.zeros(
            5, hidden.shape[0], dtype=kind, device=hidden.device
        ).unbind()
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, temperature, kind)
            peaks[part] = logits.amax(-1)
            logits.sub_(peaks[part, None])
            probs = logits.exp()
            total = probs.sum(-1)
            sums[part] = total.log()
            logprobs[part] = logits.gather(-1, labels[part, None]).squeeze(-1) - sums[part]
            entropy[part] = sums[part] - torch.linalg.vecdot(probs, logits) / total
            if squared:
                squares[part] = torch.linalg.vecdot(probs, probs) / total.square()
        ctx.save_for_backward(hidden, weight, labels, peaks, sums, entropy)
        ctx.temperature, ctx.chunk, ctx.entropy_gradient = temperature, chunk, entropy_gradient
        ctx.mark_non_differentiable(*([squares] if entropy_gradient else [squares, entropy]))
        return logprobs, entropy, squares

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, peaks, sums, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=sums.dtype)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_probs = _logits(hidden[part], weight, ctx.temperature, sums.dtype)
            log_probs.sub_(peaks[part, None]).sub_(sums[part, None])
            grad = log_probs.exp()
            if ctx.entropy_gradient:  # dH / dz_j = -p_j (log p_j + H)
                slope = log_probs.add_(entropy[part, None]).mul_(-grad_entropy[part, None])
                grad.mul_(slope.sub_(grad_logprobs[part, None]))
            else:  # d log pi / dz_j = [j = y] - p_j
                grad.mul_(-grad_logprobs[part, None])
            grad.scatter_add_(-1, labels[part, None], grad_logprobs[part, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None and grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.t(), hidden[part])
            elif grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float, kind: torch.dtype) -> Tensor:
    """Logits of a chunk; -inf (a token that cannot be) becomes the least number, whose p is 0."""
    logits = (hidden @ weight.t()).to(kind).div_(temperature)
    return logits.clamp_(min=torch.finfo(kind).min / 4)
