"""The element-wise work on a block of logits, in one pass each: forward 2 bytes a logit, backward 4.

Plain code: `_TokenStatistics` in engines/train/logprobs.py, whose notation this uses. A program works
on one row of a block, [T, W] logits in the dtype of the product, and keeps its sums in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.train.kernels import LEAST_LOGIT

TILE = 4096  # logits that a program holds at once
WARPS = 8


@triton.jit
def _accumulate(
    logits,
    labels,
    state,
    start,
    words,
    rows,
    temperature,
    least,
    squared: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * words
    peak = tl.load(state + row)
    sums = tl.load(state + rows + row)
    products = tl.load(state + 2 * rows + row)
    squares = tl.load(state + 3 * rows + row)
    for first in range(0, words, tile):
        columns = first + tl.arange(0, tile)
        inside = columns < words
        z = tl.load(line + columns, mask=inside, other=0.0).to(tl.float32) / temperature
        z = tl.where(inside, tl.maximum(z, least), least)
        higher = tl.maximum(peak, tl.max(z, 0))
        fall = peak - higher  # <= 0: what was summed so far shrinks by its exponential
        shrink = tl.exp(fall)
        z = z - higher
        probs = tl.where(inside, tl.exp(z), 0.0)
        products = (products + sums * fall) * shrink + tl.sum(z * probs, 0)
        sums = sums * shrink + tl.sum(probs, 0)
        if squared:
            squares = squares * shrink * shrink + tl.sum(probs * probs, 0)
        peak = higher
    tl.store(state + row, peak)
    tl.store(state + rows + row, sums)
    tl.store(state + 2 * rows + row, products)
    if squared:
        tl.store(state + 3 * rows + row, squares)
    column = tl.load(labels + row) - start
    if (column >= 0) & (column < words):
        picked = tl.load(line + column).to(tl.float32) / temperature
        tl.store(state + 4 * rows + row, tl.maximum(picked, least))


@triton.jit
def _slopes(
    logits,
    labels,
    log_sums,
    entropy,
    grad_logprobs,
    grad_entropy,
    start,
    words,
    temperature,
    least,
    with_entropy: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * words
    log_sum = tl.load(log_sums + row)
    at_label = tl.load(grad_logprobs + row)
    column = tl.load(labels + row) - start
    if with_entropy:
        uncertainty = tl.load(entropy + row)
        slope = tl.load(grad_entropy + row)
    for first in range(0, words, tile):
        columns = first + tl.arange(0, tile)
        inside = columns < words
        z = tl.load(line + columns, mask=inside, other=0.0).to(tl.float32) / temperature
        log_probs = tl.maximum(z, least) - log_sum
        probs = tl.exp(log_probs)
        falling = 0.0 - at_label
        if with_entropy:  # dH / dz_j = -p_j (log p_j + H)
            grad = probs * (falling - slope * (log_probs + uncertainty))
        else:
            grad = probs * falling
        grad = tl.where(columns == column, grad + at_label, grad) / temperature
        tl.store(line + columns, grad.to(logits.dtype.element_ty), mask=inside)


class RowState:
    """What is known of each row after the blocks so far: float32 [5, T].

    Peak, sums of exp z, z exp z and (exp z)^2 relative to it, and the label's logit.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = torch.zeros(5, rows, dtype=torch.float32, device=device)
        self._rows[0].fill_(LEAST_LOGIT)

    def add(
        self, logits: Tensor, labels: Tensor, start: int, temperature: float, squared: bool
    ) -> None:
        """Add a block's logits [T, W], undivided, whose first word is `start`; labels: int64 [T]."""
        rows, words = logits.shape
        if not rows:
            return
        assert logits.is_contiguous() and labels.is_contiguous()
        _accumulate[(rows,)](
            logits,
            labels,
            self._rows,
            start,
            words,
            rows,
            temperature,
            LEAST_LOGIT,
            squared=squared,
            tile=tile_of(words),
            num_warps=WARPS,
        )

    def unbind(self) -> tuple[Tensor, ...]:
        """Peaks, sums, products, squares and the labels' logits, [T] each."""
        return self._rows.unbind()


def slopes(
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    start: int,
    temperature: float,
) -> None:
    """Put the gradient of a block's logits [T, W] in their place.

    Args:
        logits: Undivided, in the product's dtype; overwritten.
        labels: int64 [T], of the whole vocabulary.
        log_sums: [T] float32, logarithm of the sum of the row's exponentials: log pi = z - log_sum.
        entropy: [T] float32, nats.
        grad_logprobs: [T] float32, of each label's log-prob.
        grad_entropy: [T] float32; None: the entropy has no gradient.
        start: The block's first word.
        temperature: By which logits are divided.
    """
    rows, words = logits.shape
    if not rows:
        return
    assert logits.is_contiguous()
    slope = grad_logprobs if grad_entropy is None else grad_entropy
    _slopes[(rows,)](
        logits,
        labels,
        log_sums,
        entropy,
        grad_logprobs.contiguous(),
        slope.contiguous(),
        start,
        words,
        temperature,
        LEAST_LOGIT,
        with_entropy=grad_entropy is not None,
        tile=tile_of(words),
        num_warps=WARPS,
    )


def tile_of(words: int) -> int:
    """A power of two, at most TILE."""
    return min(TILE, triton.next_power_of_2(max(words, 16)))
