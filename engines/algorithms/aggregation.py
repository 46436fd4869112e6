"""From the losses of tokens to one number, with denominators that hold across micro-batches.

The modes are the names of `algorithm.aggregation` in a recipe. The denominators count the whole
mini-batch (all micro-batches, all ranks): adding up the results of its parts gives the result of the
whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.algorithms.jagged import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Normaliser:
    """Counts of the whole mini-batch: every micro-batch of every rank."""

    tokens: float  # tokens with mask 1
    sequences: float  # rows with at least one token of mask 1
    rows: float  # rows, empty ones too
    max_tokens: float  # constant divisor of seq-mean-token-sum-norm, in tokens (longest response)
    ranks: int = 1  # the loss is multiplied by it, because data parallelism averages gradients

    @classmethod
    def of(
        cls, mask: Tensor, rows: Rows, max_tokens: float | None = None, ranks: int = 1
    ) -> Normaliser:
        """The counts of one batch that is the whole mini-batch (so there is one rank).

        Args:
            mask: bool [T].
            rows: N rows, T tokens.
            max_tokens: longest response in tokens; None: the longest row of this batch.
            ranks: 1.

        Raises:
            ValueError: for more ranks than one, whose counts must be added up first.
        """
        if ranks > 1:
            raise ValueError(
                f"the counts of one rank are not those of {ranks}. Add them up over the ranks."
            )
        return cls(
            tokens=float(mask.sum()),
            sequences=float((rows.tokens(mask) > 0).sum()),
            rows=float(rows.count),
            max_tokens=float(max_tokens or (int(rows.lengths.max()) if rows.count else 1)),
            ranks=ranks,
        )


def aggregate(
    losses: Tensor, mask: Tensor, rows: Rows, normaliser: Normaliser, mode: str
) -> Tensor:
    """The losses of tokens as one number; 0, with gradient 0, where nothing counts.

    With l the loss, m the mask, T and N the mini-batch's tokens and non-empty rows, R the ranks:

    - token-mean: R / T * sum_it m l (DAPO, arXiv:2503.14476)
    - token-sum: R * sum_it m l
    - seq-mean-token-sum: R / N * sum_i sum_t m l
    - seq-mean-token-mean: R / N * sum_i (sum_t m l / sum_t m) (GRPO, arXiv:2402.03300)
    - seq-mean-token-sum-norm: R / (N * L) * sum_i sum_t m l with L = max_tokens, a constant
      (Dr. GRPO, arXiv:2503.20783)
    - row-mean-token-mean, row-mean-token-sum: as seq-mean-*, with empty rows in the count of rows
      (GMPO, LUSPO, TRL's grpo)

    Args:
        losses: [T], with gradient.
        mask: bool [T], True where the loss counts; what stands under False (NaN too) is never used.
        rows: N rows, T tokens.
        normaliser: the counts of the whole mini-batch, of all ranks.
        mode: one of the above.

    Returns:
        Scalar with gradient; the sum over micro-batches, averaged over ranks, is the whole's.

    Raises:
        ValueError: for another mode.
    """
    if mode in ("seq-mean-token-mean", "row-mean-token-mean"):
        total = rows.masked_mean(losses, mask).sum()
    else:
        total = torch.where(mask, losses, 0.0).sum()
    return total * (normaliser.ranks / max(_divisor(normaliser, mode), 1e-8))


def _divisor(normaliser: Normaliser, mode: str) -> float:
    divisors = {
        "token-mean": normaliser.tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": normaliser.sequences,
        "seq-mean-token-mean": normaliser.sequences,
        "seq-mean-token-sum-norm": normaliser.sequences * normaliser.max_tokens,
        "row-mean-token-mean": normaliser.rows,
        "row-mean-token-sum": normaliser.rows,
    }
    if mode not in divisors:
        raise ValueError(f"aggregation '{mode}' is not known. Choose one of {', '.join(divisors)}.")
    return divisors[mode]
