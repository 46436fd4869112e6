"""Log-probs and entropy of tokens from hidden states, in chunks: no [T, V] tensor is ever held."""

from __future__ import annotations

from dataclasses import dataclass

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
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, chunk, entropy_gradient, squared):  # type: ignore[override]
        kind = torch.promote_types(hidden.dtype, torch.float32)
        out = torch.empty(3, hidden.shape[0], dtype=kind, device=hidden.device)
        normalisers = torch.empty(hidden.shape[0], dtype=kind, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part] @ weight.t()).to(kind).div_(temperature)
            norm = logits.logsumexp(-1)
            normalisers[part] = norm
            out[0, part] = logits.gather(-1, labels[part, None]).squeeze(-1) - norm
            probs = (logits - norm[:, None]).exp_()
            out[1, part] = norm - torch.linalg.vecdot(probs, logits)
            if squared:
                out[2, part] = torch.linalg.vecdot(probs, probs)
        ctx.save_for_backward(hidden, weight, labels, normalisers, out[1])
        ctx.temperature, ctx.chunk, ctx.entropy_gradient = (
            temperature,
            chunk,
            entropy_gradient,
        )
        entropy, squares = out[1].clone(), out[2]
        ctx.mark_non_differentiable(squares)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return out[0].clone(), entropy, squares

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, _):  # type: ignore[override]
        hidden, weight, labels, normalisers, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=normalisers.dtype) if wants_weight else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = (hidden[part] @ weight.t()).to(normalisers.dtype).div_(ctx.temperature)
            grad = (logits - normalisers[part, None]).exp_()  # probabilities, then the gradient
            if ctx.entropy_gradient:
                # dH/dz_j = -p_j (z_j - sum_k p_k z_k) = -p_j (z_j - norm + H)
                centred = logits.sub_((normalisers[part] - entropy[part])[:, None])
                grad.mul_(centred.mul_(-grad_entropy[part, None]).sub_(grad_logprobs[part, None]))
            else:
                grad.mul_(-grad_logprobs[part, None])
            grad.scatter_add_(-1, labels[part, None], grad_logprobs[part, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None
