"""From the numbers of tokens to one number: losses (`aggregate`) and metrics (`MetricSums`).

Both hold across micro-batches and ranks: the denominators of a loss count the whole mini-batch, and a
metric is kept as sum and count until the end, so that adding up the results of the parts gives the
result of the whole. The modes of a loss are the names of `algorithm.aggregation` in a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSums:
    """Additive metrics; the names depend on the method only, never on the data.

    Two micro-batches, of 2 and 1 tokens:

        a = MetricSums(means={"kl": tensor([0.3, 2.0])}, maxima={"ratio_max": tensor(1.5)})
        b = MetricSums(means={"kl": tensor([0.3, 1.0])}, maxima={"ratio_max": tensor(1.2)})
        (a + b).values()  # {"kl": 0.2, "ratio_max": 1.5}
    """

    means: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [2]: sum, count
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # name -> scalar that adds up
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # name -> scalar; -inf for no token

    def __add__(self, other: MetricSums) -> MetricSums:
        """Sums added by name, maxima taken; a name that one side lacks is kept."""
        return MetricSums(
            means=_merged(self.means, other.means, torch.add),
            sums=_merged(self.sums, other.sums, torch.add),
            maxima=_merged(self.maxima, other.maxima, torch.maximum),
        )

    def stacked(self) -> tuple[Tensor, Tensor]:
        """(float64 [K] of sums and counts, float64 [M] of maxima), in the order of the names.

        All-reduce the first with SUM and the second with MAX, then `restored`.
        """
        added = [self.means[name] for name in sorted(self.means)]
        added += [self.sums[name].reshape(1) for name in sorted(self.sums)]
        peaks = [self.maxima[name].reshape(1) for name in sorted(self.maxima)]
        return _joined(added), _joined(peaks)

    def restored(self, added: Tensor, peaks: Tensor) -> MetricSums:
        """The metrics of this one's names with the numbers of `stacked`."""
        pairs = added[: 2 * len(self.means)].reshape(-1, 2)
        return MetricSums(
            means=dict(zip(sorted(self.means), pairs, strict=True)),
            sums=dict(zip(sorted(self.sums), added[2 * len(self.means) :], strict=True)),
            maxima=dict(zip(sorted(self.maxima), peaks, strict=True)),
        )

    def values(self) -> dict[str, float]:
        """name -> mean (0 where nothing was counted), sum, or maximum (left out without a token)."""
        result = {
            name: float(pair[0] / pair[1]) if float(pair[1]) else 0.0
            for name, pair in self.means.items()
        }
        result |= {name: float(total) for name, total in self.sums.items()}
        result |= {n: float(v) for n, v in self.maxima.items() if float(v) != float("-inf")}
        return result


def _merged(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, Tensor]:
    both = {name: join(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
    return {**ours, **theirs, **both}


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors).double() if tensors else torch.zeros(0, dtype=torch.float64)


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """What MetricSums.means holds of a mean: [2], the sum of values under mask 1, and their number.

    Args:
        values: [T] or [N], of any dtype; detached. A bool gives the share that is True.
        mask: bool, of the same shape; what stands under False (NaN too) is ignored.
    """
    numbers = values.detach() if values.is_floating_point() else values.float()
    kept = torch.where(mask, numbers, 0.0)
    return torch.stack([kept.sum(), mask.sum().to(kept.dtype)])


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of values [T] or [N] over the places of mask 1 (scalar), 0 without any. Detached."""
    total, count = mean_over(values, mask)
    return total / count.clamp(min=1)


def largest_of(values: Tensor, mask: Tensor) -> Tensor:
    """The largest of values [T] under mask 1 (scalar), -inf without any. Detached."""
    if values.numel() == 0:
        return torch.full((), float("-inf"), device=values.device)
    return torch.where(mask, values.detach(), float("-inf")).max()
