"""Statistics over groups of samples (the samples of one prompt) in float64, and whitening."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.algorithms.jagged import Rows, divide


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Which samples belong together. Samples in no order, group numbers of any kind.

    Four samples of two prompts, of which one has no reward:

        rewards = tensor([1.0, 5.0, 3.0, nan])
        groups = Groups.of(tensor([7, 4, 7, 4]), ~rewards.isnan())
        groups.member          # tensor([1, 0, 1, 0])
        groups.sizes           # tensor([1.0, 2.0])
        groups.mean(rewards)   # tensor([5.0, 2.0])
        groups.alone()         # tensor([False, True, False, True])
    """

    member: Tensor  # int64 [N]; group of each sample, numbered from 0 in the order of the ids
    present: Tensor  # bool [N]; False for a sample that does not count
    sizes: Tensor  # float64 [G]; samples present

    @classmethod
    def of(cls, ids: Tensor, present: Tensor | None = None) -> Groups:
        """Groups from ids [N]; present, bool [N]: samples that count (None: all of them)."""
        unique, member = torch.unique(ids, return_inverse=True)
        if present is None:
            present = torch.ones_like(ids, dtype=torch.bool)
        sizes = torch.zeros(unique.numel(), dtype=torch.float64, device=ids.device)
        return cls(
            member=member, present=present, sizes=sizes.index_add_(0, member, present.double())
        )

    def sum(self, values: Tensor) -> Tensor:
        """Sum of each group's present values: [N] -> float64 [G]."""
        kept = torch.where(self.present, values.double(), 0.0)
        return torch.zeros_like(self.sizes).index_add_(0, self.member, kept)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of each group's present values: [N] -> float64 [G]; 0 for a group without any."""
        return self.sum(values) / self.sizes.clamp(min=1)

    def deviation(self, values: Tensor) -> Tensor:
        """Standard deviation (divisor n - 1) of each group: [N] -> float64 [G]; 0 for one sample.

        Exactly 0 where the values are equal, whatever the rounding of their mean.
        """
        centred = values.double() - self.mean(values)[self.member]
        spread = (self.sum(centred.square()) / (self.sizes - 1).clamp(min=1)).sqrt()
        return torch.where(self.uniform(values), 0.0, spread)

    def uniform(self, values: Tensor) -> Tensor:
        """Whether all present values of each group are equal: [N] -> bool [G]."""
        return self.largest(values) == self.smallest(values)

    def largest(self, values: Tensor) -> Tensor:
        """Largest present value of each group: [N] -> float64 [G]; -inf for a group without any."""
        kept = torch.where(self.present, values.double(), float("-inf"))
        start = torch.full_like(self.sizes, float("-inf"))
        return start.scatter_reduce_(0, self.member, kept, "amax")

    def smallest(self, values: Tensor) -> Tensor:
        """Smallest present value of each group: [N] -> float64 [G]; inf for a group without any."""
        return -self.largest(-values)

    def alone(self) -> Tensor:
        """Whether the sample's group has just one sample that is present: bool [N]."""
        return (self.sizes == 1)[self.member]

    def ranks(self, values: Tensor) -> Tensor:
        """Place of each sample in its group, 0 for the largest value; ties by order [N].

        Samples that do not count come last.
        """
        kept = torch.where(self.present, values.double(), float("-inf"))
        by_value = kept.argsort(descending=True, stable=True)
        order = by_value[self.member[by_value].argsort(stable=True)]
        counts = torch.bincount(self.member, minlength=self.sizes.numel())
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        return place - first[self.member]


def whitened(values: Tensor, counts: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8): mean 0 and variance 1, but 0 where there is one value.

    Args:
        values: [T] of tokens, or [N] of samples.
        counts: how often each value stands for, of the same shape (the tokens of a sample, or a
            mask as numbers); what has count 0 is transformed as the others, but not counted. None:
            each once.

    Returns:
        As values. The mean's denominator is the sum of the counts, the variance's one less.
    """
    mean, variance = moments(values, counts)
    scale = 1 / (variance + 1e-8).sqrt()
    return (values - mean).mul_(scale)


def moments(values: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and variance of values (scalars), 0 for nothing, variance 0 for one value.

    Args and denominators as for `whitened`.
    """
    nothing = values.new_zeros(())
    if counts is None:
        mean = values.mean() if values.numel() else nothing
        return mean, values.var() if values.numel() > 1 else nothing
    counted, total = torch.where(counts > 0, values, 0.0), counts.sum()
    mean = (counts * counted).sum() / total.clamp(min=1)
    squares = counts * (counted - mean).square()
    return mean, squares.sum() / (total - 1).clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMoments:
    """What each row adds to the mean and variance of all tokens; float64 [N] each.

    A row's numbers depend on that row alone, and rows are added up in their order. So a batch that
    was cut into parts between rows has the same mean and variance as in one piece, to the bit.

    Rows [1, 3] and [5]: counts [2, 1], sums [4, 5], squares [2, 0]; combined() is (3, 4).
    """

    counts: Tensor  # tokens
    sums: Tensor
    squares: Tensor  # squared distances from the row's own mean, added up

    @classmethod
    def of(cls, values: Tensor, rows: Rows) -> RowMoments:
        """Of values [T] in N rows."""
        numbers, counts = values.double(), rows.lengths.double()
        sums = rows.sum(numbers)
        distance = numbers - rows.spread(divide(sums, counts))
        return cls(counts=counts, sums=sums, squares=rows.sum(distance.square()))

    def combined(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (divisor n - 1) of all tokens, scalars; 0 where nothing defines them.

        Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.
        """
        total = self.counts.sum()
        mean = self.sums.sum() / total.clamp(min=1)
        between = self.counts * (divide(self.sums, self.counts) - mean).square()
        squares = (self.squares + between).sum()
        return mean, squares / (total - 1).clamp(min=1)


def whitened_rows(
    values: Tensor, rows: Rows, moments: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """As `whitened`, of tokens [T] in N rows.

    moments: mean and variance to whiten by, where the rows are a part of a batch; None: their own.
    """
    mean, variance = RowMoments.of(values, rows).combined() if moments is None else moments
    return (values - mean).mul_(1 / (variance + 1e-8).sqrt())
