"""From the numbers of tokens to one number: losses (`aggregate`) and metrics (`MetricSums`).

Both hold across micro-batches and ranks: the denominators of a loss count the whole mini-batch, and a
metric is kept as sum and count until the end, so that adding up the results of the parts gives the
result of the whole. The modes of a loss are the names of `algorithm.aggregation` in a recipe.

Below them stand jagged data, values [T] and row offsets [N + 1]: `Rows` says where the rows are and
reduces over them, `Kept` drops the masked tokens and puts them back, `discounted_sums` and
`cumulative_sums` run along each row. A padded matrix is the jagged batch whose rows are all equally
long (`Rows.padded`) with a mask, so there is one code path and padding is one more masked token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BLOCK = 32  # tokens summed by one matrix product; the loop runs over the blocks of the longest row
FEWEST_BLOCKS = 256  # in a matrix product


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Where the rows of a flat [T] tensor begin and end, and the row of each token.

    Three rows of 2, 0 and 1 tokens:

        rows = Rows.of_lengths(tensor([2, 0, 1]))
        rows.offsets                                # tensor([0, 2, 2, 3])
        rows.ids                                    # tensor([0, 0, 2])
        rows.sum(tensor([1.0, 2.0, 5.0]))           # tensor([3.0, 0.0, 5.0])
        rows.spread(tensor([7.0, 8.0, 9.0]))        # tensor([7.0, 7.0, 9.0])
    """

    offsets: Tensor  # int64 [N + 1]; row i is values[offsets[i]:offsets[i + 1]]
    ids: Tensor  # int64 [T]; row number of each token, ascending

    @classmethod
    def of_offsets(cls, offsets: Tensor) -> Rows:
        """Rows from offsets [N + 1]; offsets[0] is 0 and they do not decrease."""
        offsets = offsets.to(torch.int64)
        count = offsets.numel() - 1
        total = int(offsets[-1])
        # A cumulative sum of row starts is ten times faster than repeat_interleave.
        starts = torch.zeros(total + 1, dtype=torch.int64, device=offsets.device)
        if count > 1:
            starts.index_add_(0, offsets[1:-1], torch.ones_like(offsets[1:-1]))
        return cls(offsets=offsets, ids=starts[:total].cumsum(0))

    @classmethod
    def of_lengths(cls, lengths: Tensor) -> Rows:
        """Rows from lengths [N]."""
        lengths = lengths.to(torch.int64)
        return cls.of_offsets(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    @classmethod
    def padded(cls, count: int, width: int, device: torch.device | None = None) -> Rows:
        """The rows of a [count, width] matrix, flattened; the mask tells which cells are tokens."""
        offsets = torch.arange(count + 1, device=device) * width
        ids = torch.arange(count, device=device).repeat_interleave(width)
        return cls(offsets=offsets, ids=ids)

    @property
    def count(self) -> int:
        """Number of rows, N."""
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, masked ones included [N]."""
        return self.offsets[1:] - self.offsets[:-1]

    def sum(self, values: Tensor) -> Tensor:
        """Sum of each row: [T] -> [N]; 0 for an empty row. Differentiable."""
        return _RowSum.apply(values, self.offsets, self.ids)

    def spread(self, per_row: Tensor) -> Tensor:
        """Each row's number at each of its tokens: [N] -> [T]. Differentiable."""
        return _Spread.apply(per_row, self.offsets, self.ids)

    def masked_sum(self, values: Tensor, mask: Tensor) -> Tensor:
        """Sum over the tokens with mask 1 [N]; what stands under mask 0 (NaN too) is ignored."""
        return self.sum(torch.where(mask, values, 0.0))

    def tokens(self, mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Number of tokens with mask 1 in each row [N]."""
        return self.sum(mask.to(dtype))

    def masked_mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the tokens with mask 1 [N]; 0 for a row without any."""
        return self.masked_sum(values, mask) / self.tokens(mask, values.dtype).clamp(min=1)

    def masked_max(self, values: Tensor, mask: Tensor, empty: float) -> Tensor:
        """Largest of values [T] under mask 1 in each row [N], `empty` without any. No gradient."""
        floor = torch.finfo(values.dtype).min
        filled = torch.where(mask, values.detach(), floor)
        largest = torch.segment_reduce(
            filled, "max", offsets=self.offsets, unsafe=True, initial=floor
        )
        return torch.where(self.tokens(mask) > 0, largest, empty)

    def masked_min(self, values: Tensor, mask: Tensor, empty: float) -> Tensor:
        """Smallest of values [T] under mask 1 in each row [N], `empty` without any. No gradient."""
        return -self.masked_max(-values, mask, -empty)

    def ends(self) -> tuple[Tensor, Tensor]:
        """Numbers of the rows with tokens, and the position of the last token of each."""
        filled = (self.lengths > 0).nonzero().squeeze(-1)
        return filled, self.offsets[filled + 1] - 1

    def within(self) -> Tensor:
        """Position of each token in its row, from 0 [T]."""
        return torch.arange(self.ids.numel(), device=self.ids.device) - self.offsets[self.ids]

    def kept(self, mask: Tensor) -> Kept:
        """The tokens with mask 1 as rows of their own, which may become empty."""
        if bool(mask.all()):
            return Kept(rows=self, index=None, total=mask.numel())
        index = mask.nonzero().squeeze(-1)
        lengths = self.tokens(mask).to(torch.int64)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        rows = Rows(offsets=offsets, ids=self.ids.index_select(0, index))
        return Kept(rows=rows, index=index, total=mask.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Some tokens of a batch, and their way there and back."""

    rows: Rows  # of the tokens kept
    index: Tensor | None  # int64 [kept]; their places among all; None: all are kept
    total: int  # T, all tokens

    def take(self, values: Tensor) -> Tensor:
        """[T] -> [kept]."""
        return values if self.index is None else values.index_select(0, self.index)

    def put(self, values: Tensor) -> Tensor:
        """[kept] -> [T], 0 elsewhere."""
        if self.index is None:
            return values
        return values.new_zeros(self.total).index_copy_(0, self.index, values)


class _RowSum(torch.autograd.Function):
    """Row sums; the gradient is a gather (segment_reduce's own backward is five times slower)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, ids)
        return torch.segment_reduce(values, "sum", offsets=offsets, unsafe=True, initial=0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        offsets, ids = ctx.saved_tensors
        return _Spread.apply(grad, offsets, ids), None, None


class _Spread(torch.autograd.Function):
    """The dual of _RowSum: deterministic on every device, unlike index_add."""

    @staticmethod
    def forward(ctx: Any, per_row: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, ids)
        return per_row[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        offsets, ids = ctx.saved_tensors
        return _RowSum.apply(grad.contiguous(), offsets, ids), None, None


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 where the denominator is 0, in value and in gradient."""
    safe = torch.where(denominator == 0, 1.0, denominator)
    return torch.where(denominator == 0, 0.0, numerator / safe)


def discounted_sums(values: Tensor, rows: Rows, decay: float) -> Tensor:
    """S_t = sum over j >= t of decay^(j - t) values_j within the row. No gradient.

    Args:
        values: [T].
        rows: N rows, T tokens.
        decay: per token, in [0, 1].

    Returns:
        [T].

    A row is cut into blocks. Within a block the sum is a product with a triangular matrix of powers;
    between blocks it is S = local + decay^(tokens left in the block) * S(next block).
    """
    if values.numel() == 0:
        return values.clone()
    cut = _Blocks.of(rows)
    local = _product(cut.gathered(values), _powers(values, decay))
    following = cut.carried(local[:, 0], decay**BLOCK, backwards=True)
    remaining = BLOCK - torch.arange(BLOCK, device=values.device)
    weight = torch.tensor(decay, dtype=values.dtype, device=values.device) ** remaining
    return cut.restored(local.addcmul_(following[:, None], weight))


def cumulative_sums(values: Tensor, rows: Rows) -> Tensor:
    """Sum of values [T] from the row's first token up to and with each token [T]. No gradient."""
    if values.numel() == 0:
        return values.clone()
    cut = _Blocks.of(rows)
    local = _product(cut.gathered(values), _powers(values, 1.0).t())
    before = cut.carried(local[:, -1], 1.0, backwards=False)
    return cut.restored(local.add_(before[:, None]))


class _Blocks:
    """The rows cut into blocks of BLOCK tokens, the last of each row filled up with zeros."""

    def __init__(self, rows: Rows, counts: Tensor) -> None:
        device = counts.device
        self.counts = counts  # [N] blocks of each row
        self.first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # [N + 1] its first block
        row = Rows.of_offsets(self.first).ids
        inside = torch.arange(row.numel(), device=device) - self.first[row]
        self.starts = rows.offsets[row] + inside * BLOCK  # [B] first token of each block
        self.sizes = (rows.offsets[row + 1] - self.starts).clamp(max=BLOCK)  # [B] its tokens
        self.filled = torch.arange(BLOCK, device=device) < self.sizes[:, None]  # bool [B, BLOCK]

    @classmethod
    def of(cls, rows: Rows) -> _Blocks:
        return cls(rows, (rows.lengths + BLOCK - 1) // BLOCK)

    def gathered(self, values: Tensor) -> Tensor:
        """[T] -> [B, BLOCK]; windows of contiguous tokens, so that one index serves a block."""
        windows = torch.nn.functional.pad(values, (0, BLOCK)).unfold(0, BLOCK, 1)
        blocks = windows[self.starts]
        short = (self.sizes < BLOCK).nonzero().squeeze(-1)
        blocks[short] = torch.where(self.filled[short], blocks[short], 0.0)
        return blocks

    def restored(self, blocks: Tensor) -> Tensor:
        """[B, BLOCK] -> [T]."""
        return torch.masked_select(blocks, self.filled)

    def carried(self, totals: Tensor, factor: float, *, backwards: bool) -> Tensor:
        """What reaches each block from those after it (or before it) in its row: [B] -> [B]."""
        reached = torch.zeros_like(totals)
        order = self.counts.argsort(descending=True)  # many blocks first: each turn is a prefix
        counts = self.counts[order]
        turns = int(counts[0])
        active = (counts[:, None] > torch.arange(turns, device=counts.device)).sum(0).tolist()
        running = totals.new_zeros(counts.numel())
        first = self.first[:-1][order]
        for turn in reversed(range(turns)) if backwards else range(turns):
            where = first[: active[turn]] + turn
            part = running[: active[turn]]
            reached[where] = part
            part.mul_(factor).add_(totals[where])
        return reached


def _product(blocks: Tensor, powers: Tensor) -> Tensor:
    """blocks [B, BLOCK] @ powers, each row's numbers the same to the bit whatever the other rows.

    For few rows BLAS takes other kernels, which round otherwise; so few rows are made up to many.
    """
    short = FEWEST_BLOCKS - len(blocks)
    if short <= 0:
        return blocks @ powers
    return (torch.nn.functional.pad(blocks, (0, 0, 0, short)) @ powers)[: len(blocks)]


def _powers(values: Tensor, decay: float) -> Tensor:
    """[BLOCK, BLOCK]: decay^(j - t) at row j, column t where j >= t, else 0."""
    index = torch.arange(BLOCK, device=values.device)
    distance = index[:, None] - index[None, :]
    powers = torch.tensor(decay, dtype=torch.float64, device=values.device) ** distance.clamp(min=0)
    return torch.where(distance >= 0, powers, 0.0).to(values.dtype)


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
    if mode in ("seq-mean-token-mean", "row-mean-token-mean"):
        total = rows.masked_mean(losses, mask).sum()
    else:
        total = torch.where(mask, losses, 0.0).sum()
    return total * (normaliser.ranks / max(divisors[mode], 1e-8))


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
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, Tensor]:
    common = {name: join(first[name], second[name]) for name in first.keys() & second.keys()}
    return {**first, **second, **common}


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors).double() if tensors else torch.zeros(0, dtype=torch.float64)


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """What MetricSums.means holds of a mean: [2], the sum of values under mask 1, and their number.

    Args:
        values: [T] or [N], of any dtype; detached. A bool gives the share that is True.
        mask: bool, of the same shape; what stands under False (NaN too) is ignored.
    """
    numbers = values.detach() if values.is_floating_point() else values.float()
    values = torch.where(mask, numbers, 0.0)
    return torch.stack([values.sum(), mask.sum().to(values.dtype)])


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of values [T] or [N] over the places of mask 1 (scalar), 0 without any. Detached."""
    total, count = mean_over(values, mask)
    return total / count.clamp(min=1)


def largest_of(values: Tensor, mask: Tensor) -> Tensor:
    """The largest of values [T] under mask 1 (scalar), -inf without any. Detached."""
    if values.numel() == 0:
        return torch.full((), float("-inf"), device=values.device)
    return torch.where(mask, values.detach(), float("-inf")).max()
