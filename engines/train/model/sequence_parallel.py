"""Sequence parallelism after Ulysses: ranks that share each micro-batch, a part of its tokens each.

Everything but attention works on a rank's own tokens. For attention the ranks exchange tokens for
heads, so that each has all tokens of its share of the heads, and back (DeepSpeed-Ulysses,
arXiv:2309.14509). Of S ranks, rank s holds the tokens s, s + S, s + 2 S, …: prompts, whose tokens
predict nothing, and responses are spread alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.train.model.rendezvous import Meeting

_groups: dict[int, tuple[dist.ProcessGroup, SequenceGroup]] = {}  # by size, with all ranks' group


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceGroup:
    """The ranks that share sequences with this one, itself among them."""

    group: dist.ProcessGroup | None  # None: it is alone
    rank: int  # in the group
    size: int  # S
    replica: int  # which of the groups this is, from 0
    replicas: int  # groups; each has micro-batches of its own

    @property
    def counts(self) -> bool:
        """Whether what the group has together is counted by this rank."""
        return self.rank == 0

    def own(self, x: Tensor) -> Tensor:
        """This rank's share of x [T, …], ceil(T / S) rows; what lacks at the end is x's first row."""
        if self.size == 1:
            return x
        missing = -len(x) % self.size
        padded = torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) if missing else x
        return padded[self.rank :: self.size]

    def places_held(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some tokens (int64 [R], numbers below T) this rank holds, and where in its share.

        Returns:
            Two int64 [r]: places among the R, ascending, and rows of this rank's share.
        """
        places = (tokens % self.size == self.rank).nonzero().squeeze(-1)
        return places, tokens[places] // self.size

    def together(
        self, values: tuple[Tensor, ...], places: Tensor | None, total: int
    ) -> tuple[Tensor, ...]:
        """The numbers of all ranks: each gives [r] at its places of [R]; a collective.

        The gradient of a rank's numbers is that of its own result, not the sum over the ranks'
        results: these are one and the same loss.
        """
        if self.size == 1:
            return values
        whole: Tensor = _Together.apply(torch.stack(values), places, total, self.group)
        return tuple(whole.unbind())

    def table(self, rows: Tensor, places: Tensor | None, total: int) -> Tensor:
        """As `together`, of rows of numbers: [r, n] of each rank make [R, n]; a collective."""
        if self.size == 1:
            return rows
        return torch.stack(self.together(rows.unbind(-1), places, total), dim=-1)

    def to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From a rank's tokens of all heads to all tokens of its heads; a collective.

        Args:
            query: [1, H, c, D] of c = ceil(T / S) tokens; H is a multiple of S.
            key, value: [1, G, c, D]; heads are repeated where G is no multiple of S.
            tokens: T.

        Returns:
            [1, H / S, T, D] and twice [1, lcm(G, S) / S, T, D].
        """
        groups, count, size = key.shape[1:]
        repeated = math.lcm(groups, self.size) // groups
        if repeated > 1:
            key, value = (x.repeat_interleave(repeated, 1) for x in (key, value))
        parts = [
            x[0].transpose(0, 1).reshape(count, self.size, -1, size) for x in (query, key, value)
        ]
        widths = [part.shape[2] for part in parts]
        sent = torch.cat(parts, 2)
        all_tokens = _Exchange.apply(sent, self.group).flatten(0, 1)[:tokens]
        q, k, v = (x.transpose(0, 1)[None] for x in all_tokens.split(widths, 1))
        return q, k, v

    def to_tokens(self, out: Tensor) -> Tensor:
        """From [1, T, H / S, D] of all tokens to [1, c, H, D] of this rank's; a collective."""
        _, tokens, heads, size = out.shape
        missing = -tokens % self.size
        padded = torch.cat([out[0], out.new_zeros(missing, heads, size)]) if missing else out[0]
        received = _Exchange.apply(padded.view(-1, self.size, heads, size), self.group)
        return received.flatten(1, 2)[None]


ALONE = SequenceGroup(
    group=None, rank=0, size=1, replica=0, replicas=1
)  # of a process without others


def sequence_group(meeting: Meeting, size: int, timeout: float) -> SequenceGroup:
    """The group of `size` neighbouring ranks to which this one belongs; a collective of all ranks.

    Made once for all engines of a process that have met in the same group.

    Args:
        meeting: All ranks; their number is a multiple of `size`.
        size: 1: each rank is alone.
        timeout: Seconds that a collective of the group may take.
    """
    if meeting.world % size:
        raise ValueError(
            f"train.sequence_parallel = {size} does not divide the {meeting.world} train workers. "
            "Set it to a divisor of their number."
        )
    if size == 1:
        return SequenceGroup(
            group=None, rank=0, size=1, replica=meeting.rank, replicas=meeting.world
        )
    cached = _groups.get(size)
    if cached is not None and cached[0] is meeting.group:
        return cached[1]
    groups = [
        dist.new_group(range(first, first + size), timeout=timedelta(seconds=timeout))
        for first in range(0, meeting.world, size)
    ]
    replica, rank = divmod(meeting.rank, size)
    group = SequenceGroup(
        group=groups[replica], rank=rank, size=size, replica=replica, replicas=len(groups)
    )
    _groups[size] = (meeting.group, group)
    return group


def check_heads(heads: int, size: int) -> None:
    """Raise ValueError in a sentence where the heads cannot be shared out evenly."""
    if heads % size:
        raise ValueError(
            f"train.sequence_parallel = {size} does not divide the model's {heads} attention heads. "
            "Set it to a divisor of their number."
        )


class _Exchange(torch.autograd.Function):
    """x [c, S, …] -> [c, S, …]: part s of each row goes to rank s, which has c S rows then.

    Doing it twice gives x again, so the backward pass is the same exchange.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = x.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.transpose(0, 1).contiguous()


class _Together(torch.autograd.Function):
    """[k, r] at `places` of [k, R], with the other ranks' numbers at the other places."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, places: Tensor, total: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(values.shape[0], total)
        whole[:, places] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[:, places], None, None, None
