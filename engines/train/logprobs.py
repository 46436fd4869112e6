"""Log-probs and entropy of tokens from hidden states; no [T, V] tensor is ever held."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engines.train.kernels import LEAST_LOGIT, available

CACHED_LOGITS = 2**22  # at most held at once on a CPU: 16 MiB, which its cache holds
# Words of a GPU's block are a multiple of this: for rows whose bytes are no multiple of 16, cuBLAS
# takes kernels of an older GPU (on an H200 a quarter of all time of an update of 0.5B was in these).
ALIGNED = 256
FUSED = 4  # times as many logits at once where kernels work on them: 2 bytes each, and no copies
LEAST = 1e-30  # probability of a tail, relative to the likeliest word; its logarithm is finite then


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStatistics:
    """Of the policy's distribution pi at each token; float32.

    Example: one token, two words of probability 3/4 and 1/4, the label is the first
        TokenStatistics(logprobs=[-0.2877], entropy=[0.5623], sum_pi_squared=[0.625])
    """

    logprobs: Tensor  # [T] log pi(label), nats; with gradient
    entropy: Tensor  # [T] nats; with gradient when asked for
    # What is None was not asked for.
    sum_pi_squared: Tensor | None = None  # [T] sum over the words of pi^2, no gradient
    bins: Tensor | None = None  # [T, k + 1] log pi of k words and of all others, with gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """The words of the vocabulary that tokens were drawn from, where these were not all.

    Example: the first of two tokens was drawn from words 3 and 9, the second from all
        Support(numbers=[1, 0], sets=[1, 1], words=[3, 9], left_out=[True, False])
    """

    numbers: Tensor  # [T] int64, each token's set of words, in [0, K]; 0: all words
    sets: Tensor  # [S] int64, in [1, K], the set that each of the words is of
    words: Tensor  # [S] int64
    left_out: Tensor  # bool [K + 1], whether a set is of all words but these; true of set 0

    def at(self, places: Tensor) -> Support:
        """That of some tokens, int64 [t], in [0, T), in their order."""
        return replace(self, numbers=self.numbers[places])

    def leave_out(self, logits: Tensor, start: int) -> None:
        """Put LEAST_LOGIT for all other words of a block [T, W] that begins at word `start`."""
        words = logits.shape[1]
        out = ~self.left_out[:, None].repeat(1, words + 1)  # the last one for other blocks' words
        inside, columns = within(self.words, start, words)
        out[self.sets, torch.where(inside, columns, words)] = self.left_out[self.sets]
        logits.masked_fill_(out[:, :words][self.numbers], LEAST_LOGIT)


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy_gradient: bool = False,
    squared: bool = False,
    words: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    support: Support | None = None,
) -> TokenStatistics:
    """Log-probs and entropy of pi = softmax(hidden weight^T / temperature) at each label.

    With a bias, a scale and a soft cap c, which few models have, of
    softmax(c tanh(scale (hidden weight^T + bias) / c) / temperature).

    The product runs in hidden's dtype (weight is cast, block by block), everything after in float32
    (float64 stays float64). The backward pass computes the logits anew, but on a GPU where `chunk`
    lets all of them be held at once.

    Args:
        hidden: [T, H] last hidden states.
        weight: [V, H] output head.
        labels: [T] int64, words in [0, V).
        temperature: Sampling temperature, > 0, by which logits are divided.
        chunk: At most chunk x V logits exist at once, of 12 bytes each with what is made of them; on
            a GPU with kernels FUSED times as many, of 2 bytes.
        entropy_gradient: Whether the entropy carries a gradient.
        squared: Whether sum_pi_squared is computed.
        words: [T, k] int64, different words in [0, V) of which `bins` are computed. The tail is the
            sum over the other words, not 1 less the words' probabilities.
        bias: [V] of the output head; None: it has none.
        scale: Factor on the product and its bias, > 0.
        cap: Largest absolute logit before the temperature; None: no cap.
        support: Words among which the softmax is, for each token; its label is one of them. None:
            among all.
    """
    picked = labels[:, None] if words is None else torch.cat([labels[:, None], words], dim=-1)
    # c tanh(s x / c) / t = (c / t) tanh((x / (t / s)) / (c / t)): a scale is another temperature.
    limit = None if cap is None else cap / temperature
    logprobs, tail, entropy, squares = _TokenStatistics.apply(
        *(hidden, weight, picked, temperature / scale, chunk, entropy_gradient, squared),
        *(words is not None, bias, limit, support),
    )
    return TokenStatistics(
        logprobs=logprobs[:, 0],
        entropy=entropy,
        sum_pi_squared=squares if squared else None,
        bins=None if words is None else torch.cat([logprobs[:, 1:], tail[:, None]], dim=-1),
    )


class _TokenStatistics(torch.autograd.Function):
    """The vocabulary is walked in blocks, all tokens at once, so that each weight is used once a pass
    and its gradient needs no sum over blocks. Sums are kept relative to the largest logit so far, z:
    s = sum exp z, t = sum z exp z; then log pi = z_y - log s and H = log s - t / s. The tail's sum is
    over the words that are not picked beside the label: picked[:, 1:].
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        picked: Tensor,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
        squared: bool,
        tailed: bool,
        bias: Tensor | None,
        cap: float | None,
        support: Support | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        plain = bias is None and cap is None and support is None
        usual = not tailed and plain and kind == torch.float32
        ctx.fused = fused = usual and available(hidden)
        width = block_width(hidden, weight, chunk * FUSED if fused else chunk)
        blocks = Blocks(hidden, weight, temperature, kind, width, bias, cap, support)
        ctx.logits = None  # all of them, where one block holds them: they are not made again then
        if fused:
            peaks, sums, products, squares, logit, last = _sums_by_kernel(blocks, picked, squared)
            if width == weight.shape[0] and any(ctx.needs_input_grad[:2]):
                ctx.logits = last
            del last
            rest = torch.zeros_like(sums)
        else:
            peaks, sums, products, squares, rest, logit = _sums(blocks, picked, squared, tailed)
        logs = sums.log()
        logprobs = logit - peaks[:, None] - logs[:, None]
        tail, entropy = rest.clamp(min=LEAST).log() - logs, logs - products / sums
        ctx.save_for_backward(hidden, weight, picked, peaks, logs, entropy, logprobs, tail, bias)
        ctx.temperature, ctx.chunk, ctx.cap = temperature, chunk, cap
        ctx.entropy_gradient, ctx.tailed, ctx.support = entropy_gradient, tailed, support
        squares = squares / sums.square()
        constant = [squares] if entropy_gradient else [squares, entropy]
        ctx.mark_non_differentiable(*(constant if tailed else [*constant, tail]))
        return logprobs, tail, entropy, squares

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_tail: Tensor, grad_entropy: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, picked, peaks, logs, entropy, logprobs, tail, bias = ctx.saved_tensors
        kind = logs.dtype
        width = block_width(hidden, weight, ctx.chunk * FUSED if ctx.fused else ctx.chunk)
        blocks = Blocks(hidden, weight, ctx.temperature, kind, width, bias, ctx.cap, ctx.support)
        grad_hidden = torch.zeros_like(hidden, dtype=kind) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[8] else None
        if ctx.fused:
            slope = grad_entropy if ctx.entropy_gradient else None
            whole, ctx.logits = ctx.logits, None
            tensors = (picked, peaks + logs, entropy, grad_logprobs[:, 0], slope)
            for start, cast in _slopes_by_kernel(blocks, *tensors, whole):
                if grad_hidden is not None and cast.shape[1] == weight.shape[0]:
                    grad_hidden = cast @ blocks.weight_at(start)
                elif grad_hidden is not None:
                    add_product(grad_hidden, cast, blocks.weight_at(start))
                if grad_weight is not None:
                    grad_weight[start : start + cast.shape[1]] = cast.t() @ hidden
                del cast  # before the next block is made
            if grad_hidden is not None:
                grad_hidden = grad_hidden.to(hidden.dtype)
            return grad_hidden, grad_weight, *[None] * 9
        # d log pi_y / dz_j = [j = y] - p_j; d log tail / dz_j = [j in the tail] p_j / tail - p_j
        at_picked, falling = grad_logprobs, grad_logprobs.sum(-1, keepdim=True).neg()
        if ctx.tailed:
            share = (grad_tail / tail.exp())[:, None]
            falling = falling - grad_tail[:, None] + share
            words = at_picked[:, 1:] - logprobs[:, 1:].exp() * share
            at_picked = torch.cat([at_picked[:, :1], words], dim=-1)
        for start, log_probs in blocks:
            # c tanh(x / c) = z has the slope 1 - (z / c)^2
            slopes = None if ctx.cap is None else 1 - (log_probs / ctx.cap).square_()
            if slopes is not None and ctx.support is not None:
                slopes.clamp_(min=0)  # of words that are left out it would be no number
            log_probs.sub_(peaks[:, None]).sub_(logs[:, None])
            if ctx.entropy_gradient:  # dH / dz_j = -p_j (log p_j + H)
                slope = (log_probs + entropy[:, None]).mul_(-grad_entropy[:, None])
                grad = log_probs.exp_().mul_(slope.add_(falling))
                del slope
            else:
                grad = log_probs.exp_().mul_(falling)
            inside, columns = within(picked, start, grad.shape[1])
            grad.scatter_add_(1, columns, torch.where(inside, at_picked, 0))
            if slopes is not None:
                grad.mul_(slopes)
            if ctx.temperature != 1:
                grad.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias[start : start + grad.shape[1]] = grad.sum(0)
            cast = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += cast @ blocks.weight_at(start)
            if grad_weight is not None:
                grad_weight[start : start + grad.shape[1]] = cast.t() @ hidden
            del log_probs, slopes, grad, cast  # before the next block is made
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, *[None] * 6, grad_bias, None, None


def _sums(
    blocks: Blocks, picked: Tensor, squared: bool, tailed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Peaks [T], the sums relative to them, the tail's among them, and the picked logits [T, n]."""
    hidden, kind = blocks.hidden, blocks.kind
    sums, products, squares, rest = torch.zeros(
        4, hidden.shape[0], dtype=kind, device=hidden.device
    ).unbind()
    logit = torch.zeros(picked.shape, dtype=kind, device=hidden.device)
    peaks = torch.full_like(sums, LEAST_LOGIT)
    for start, logits in blocks:
        higher = torch.maximum(peaks, logits.amax(-1))
        fall = peaks - higher  # <= 0: what was summed so far shrinks by its exponential
        peaks = higher
        inside, columns = within(picked, start, logits.shape[1])
        logit = torch.where(inside, logits.gather(1, columns), logit)
        logits.sub_(peaks[:, None])
        probs = logits.exp()
        shrink = fall.exp()
        products.add_(sums * fall).mul_(shrink)
        sums.mul_(shrink).add_(probs.sum(-1))
        if squared:
            squares.mul_(shrink.square()).add_(probs.square().sum(-1))
        products.add_(logits.mul_(probs).sum(-1))
        if tailed:
            rest.mul_(shrink).add_(without(probs, inside[:, 1:], columns[:, 1:]).sum(-1))
        del logits, probs  # before the next block is made
    return peaks, sums, products, squares, rest, logit


def _sums_by_kernel(
    blocks: Blocks, picked: Tensor, squared: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The same without a tail, one pass over each block, and the last block; picked: [T, 1]."""
    from engines.train.kernels.head import RowState

    labels = picked[:, 0].contiguous()
    state = RowState(blocks.hidden.shape[0], blocks.hidden.device)
    last = None
    for start, logits in blocks.products():
        state.add(logits, labels, start, blocks.temperature, squared)
        last = logits if start + logits.shape[1] == len(blocks.weight) else None
        del logits  # before the next block is made
    peaks, sums, products, squares, logit = state.unbind()
    return peaks, sums, products, squares, logit[:, None], last


def _slopes_by_kernel(
    blocks: Blocks,
    picked: Tensor,
    log_sums: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    whole: Tensor | None,
) -> Iterator[tuple[int, Tensor]]:
    """The first word of each block and the gradient of its logits, in the product's dtype.

    whole: All logits, to be overwritten; None: they are made again, block by block.
    """
    from engines.train.kernels.head import slopes

    labels = picked[:, 0].contiguous()
    for start, logits in blocks.products() if whole is None else iter([(0, whole)]):
        slopes(
            *(logits, labels, log_sums, entropy, grad_logprobs, grad_entropy),
            *(start, blocks.temperature),
        )
        yield start, logits
        del logits  # before the next block is made


def add_product(total: Tensor, factor: Tensor, right: Tensor) -> None:
    """total += left @ right in float32, on CUDA without a product in between."""
    if factor.dtype == total.dtype:
        total.addmm_(factor, right)
    elif factor.is_cuda and _adds_in_float32(factor.device, factor.dtype):
        torch.addmm(total, factor, right, out_dtype=total.dtype, out=total)
    else:
        total += factor @ right


@functools.cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch can add a product of such factors to a float32 sum."""
    sums, factor = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(sums, factor, factor, out_dtype=torch.float32, out=sums)
    except (RuntimeError, TypeError):
        return False
    return bool((sums == 17).all())


@torch.no_grad()
def top_words(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    chunk: int = 1024,
    among: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The k likeliest words at each token, int64 [T, k], the likeliest first.

    Of the probabilities 1/2, 1/8, 3/8 the two likeliest are [0, 2].

    Args:
        hidden, weight, chunk, bias: As `token_statistics`; no temperature, scale or cap changes an
            order.
        k: At most as many as there are words among which they are.
        among: Only of the first so many words. None: of all.
    """
    kind = torch.promote_types(hidden.dtype, torch.float32)
    among = weight.shape[0] if among is None else among
    best = torch.full((hidden.shape[0], 0), -torch.inf, dtype=kind, device=hidden.device)
    ids = torch.zeros(hidden.shape[0], 0, dtype=torch.int64, device=hidden.device)
    width = block_width(hidden, weight, chunk)
    for start, logits in Blocks(hidden, weight, 1.0, kind, width, bias):
        readable = logits[:, : max(0, among - start)]
        values, columns = readable.topk(min(k, readable.shape[1]), dim=-1)
        values, ids = torch.cat([best, values], dim=-1), torch.cat([ids, columns + start], dim=-1)
        best, places = values.topk(min(k, values.shape[1]), dim=-1)
        ids = ids.gather(1, places)
    return ids


@dataclass(frozen=True, slots=True)
class Blocks:
    """Logits of all tokens for one block of the vocabulary after the other."""

    hidden: Tensor
    weight: Tensor
    temperature: float
    kind: torch.dtype
    width: int  # words of a block
    bias: Tensor | None = None  # [V]
    cap: float | None = None  # of logits that are divided by the temperature
    support: Support | None = None

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """The first word of each block, and its logits [T, words], which the caller may change.

        Nothing here keeps them: a caller that lets go of a block has its memory for the next.
        """
        for start in range(0, self.weight.shape[0], self.width):
            yield start, self.logits_at(start)

    def products(self) -> Iterator[tuple[int, Tensor]]:
        """The same before they are divided by the temperature, in the dtype of the product."""
        for start in range(0, self.weight.shape[0], self.width):
            yield start, self.hidden @ self.weight_at(start).t()

    def logits_at(self, start: int) -> Tensor:
        """Of the block that begins there."""
        logits = (self.hidden @ self.weight_at(start).t()).to(self.kind)
        if self.bias is not None:
            logits.add_(self.bias[start : start + self.width])
        if self.temperature != 1:
            logits.div_(self.temperature)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        logits.clamp_(min=LEAST_LOGIT)
        if self.support is not None:
            self.support.leave_out(logits, start)
        return logits

    def weight_at(self, start: int) -> Tensor:
        """The block's rows of the output head, in the dtype of the product."""
        return self.weight[start : start + self.width].to(self.hidden.dtype)


def within(picked: Tensor, start: int, words: int) -> tuple[Tensor, Tensor]:
    """Whether each picked word is in a block, bool [T, n], and where in it; 0 where it is not.

    Without asking a device how many there are, which would wait for it.
    """
    inside = (picked >= start) & (picked < start + words)
    return inside, torch.where(inside, picked - start, 0)


def without(probs: Tensor, inside: Tensor, columns: Tensor) -> Tensor:
    """A block's [T, words] with 0 at the words of which `within` says where they are."""
    chosen_probs = torch.where(inside, probs.gather(1, columns), 0).neg_()
    return probs.scatter_add(1, columns, chosen_probs)


def block_width(hidden: Tensor, weight: Tensor, chunk: int) -> int:
    """Words of a block: chunk x V logits in all, on a CPU no more than its cache holds.

    On a GPU a multiple of ALIGNED where it is that wide.
    """
    logits = chunk * weight.shape[0]
    if hidden.device.type == "cpu":
        logits = min(logits, CACHED_LOGITS)
    whole = weight.shape[0]
    width = max(1, min(whole, logits // max(hidden.shape[0], 1)))
    if hidden.device.type == "cpu" or width < ALIGNED or width == whole:
        return width
    return width - width % ALIGNED
