"""Rows laid end to end as tensors: a shared prompt is there once, with tree training more than that.

Of a row that is a forest of requests each path is a sequence. What paths share is found by their
tokens, as with tree training, and computed once; what comes out of a forward pass is one number for
each response token again, in the order of the row. Attention over the packed tokens is in
engines/train/model/attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines.algorithms.aggregation import Rows
from engines.models.attention import LONG, hands_on, mixers, rope_limit
from engines.models.routed_experts import RoutedExperts, as_ids, extended
from engines.train.batching.tree_training import in_order
from engines.train.logprobs import Support
from engines.train.model.attention import AttentionLayout, Bucket
from storage.batches.forest import Forest
from storage.batches.sampling_mask import SamplingMask

SHORTEST_SHARE = 0.75  # a bucket holds sequences of at least this share of its longest one's length

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distinct:
    """Response tokens of several rows whose numbers are the same: U of R are computed.

    Example: the responses [7, 8, 9] and [7, 8, 4] to one prompt
        Distinct(first=[0, 1, 2, 5], member=[0, 1, 2, 0, 1, 3])
    """

    first: Tensor  # [U] int64: which of the R are computed
    member: Tensor  # [R] int64: the one of the U whose numbers each has


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """What a forward pass over some rows needs: T tokens in, numbers of R response tokens out.

    Rows that share a prompt share its tokens; with tree training, all tokens that they begin with.
    The last token of a row, or of each of its paths (forest.py), is only ever a label.

    Example: prompt [5, 6] with the responses [7, 8, 9] and [4]
        tokens     = [5, 6, 7, 8]  # the prompt once, the first response without its last token
        positions  = [0, 1, 2, 3]
        predictors = [1, 2, 3, 1]  # token 6 predicts 7, 7 predicts 8, 8 predicts 9; 6 predicts 4
        labels     = [7, 8, 9, 4]
        rows       = offsets [0, 3, 4]
        squares    = 4 * 4 + 2 * 2
        whole      = 4 + 2
    """

    # [T] int64: distinct prompts, then each row's response but for its last token; with tree training
    # first those that most rows share
    tokens: Tensor
    positions: Tensor  # [T] int64: position of each token in its sequence
    layout: AttentionLayout  # of the T tokens in their sequences
    predictors: Tensor  # [R] int64: the token whose hidden state predicts each response token
    labels: Tensor  # [R] int64: response tokens of all rows
    rows: Rows  # where the R response tokens of each row begin and end; rows may be empty
    squares: int  # sum of squared sequence lengths, for the count of FLOPs
    whole: int  # tokens of the rows, were nothing shared
    distinct: Distinct | None = None  # of the R; None: each is computed
    # uint8 [F, H, W, 3], what a policy looks at; -1 - i among the tokens is patch i of all. None: it
    # does not look.
    images: Tensor | None = None
    # [T, L, k] int16: ids of k experts of each token in L layers; -1, or None: as the routers choose
    routed_experts: Tensor | None = None
    support: Support | None = None  # words that the R were drawn from; None: all

    @property
    def predicted(self) -> int:
        """Response tokens whose logits are computed."""
        return self.labels.numel() if self.distinct is None else self.distinct.first.numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNeeds:
    """How rows are laid out for a model; a plain one needs nothing of this."""

    # On any device dense batches of sequences of about one length: for recurrent layers, and for
    # attention with a cap or sinks.
    dense: bool = False
    # One dense batch of whole sequences, none shared: the model's own code computes attention.
    whole: bool = False
    rope_limit: int | None = None  # tokens from which on sequences have other rotary positions
    routed_experts: bool = False  # the experts that each token was sampled with
    sampling_mask: bool = False  # the words that it was drawn from, where samples have them


PLAIN = RowNeeds()


def row_needs(model: PreTrainedModel) -> RowNeeds:
    """Of a language model, by its code and its config."""
    mixing, limit = mixers(model), rope_limit(model.config)
    if mixing.own or not mixing.attention or not hands_on(model):
        return RowNeeds(dense=True, whole=True, rope_limit=limit)
    text = model.config.get_text_config()
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    return RowNeeds(dense=bool(mixing.recurrent) or capped or sinks, rope_limit=limit)


def why_together(model: PreTrainedModel) -> str | None:
    """Why a model's layers are not compiled and its sequences not divided over ranks, as a clause.

    None: they may be.
    """
    mixing, needs = mixers(model), row_needs(model)
    if needs.whole:
        names = f" ({', '.join(mixing.names)})" if mixing.names else ""
        return f"its attention is computed by its own code{names}"
    if mixing.recurrent:
        return f"its layers ({', '.join(mixing.names)}) carry a state from token to token"
    if needs.dense:
        return "its attention has a cap on scores, or sinks"
    if needs.rope_limit is not None:
        return f"its positions depend on whether a sample has more than {needs.rope_limit} tokens"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The paths of some rows, each of two tokens or more: of one token nothing is predicted.

    Example: the row of Forest's example, with the tokens 5 6 | 7 8 9 | 4 | 3 2
        Sequences(
            tokens=[[5, 6, 7, 8, 9], [5, 6, 7, 8, 4], [3, 2]],
            paths=[[[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [6, 7]]],
            forests=[...],
        )
    """

    tokens: list[Ints]  # of each path, row after row
    paths: list[list[Ints]]  # of each row: numbers of the tokens of each of its paths
    forests: Sequence[Forest]

    @classmethod
    def of(
        cls, prompts: Sequence[Ints], responses: Sequence[Ints], forests: Sequence[Forest]
    ) -> Sequences:
        """Those of rows with prompts [P_i] and responses [R_i]."""
        paths = [[path for path in forest.paths() if len(path) > 1] for forest in forests]
        rows = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
        tokens = [row[path] for row, own in zip(rows, paths, strict=True) for path in own]
        return cls(tokens=tokens, paths=paths, forests=forests)

    def predictors(self, members: Sequence[Ints]) -> list[Ints]:
        """Of each row [R_i]: where the token is computed that each response token goes on after.

        0, of which nothing is trained, where it begins a conversation of its own. Where two paths
        compute it apart (LongRoPE: positions of long sequences differ) the first one counts.

        members: of each path, where its tokens but for the last are computed.
        """
        predictors, each = [], iter(members)
        for forest, paths in zip(self.forests, self.paths, strict=True):
            before = np.zeros(forest.tokens, np.int64)
            for path, member in reversed(list(zip(paths, each, strict=False))):
                before[path[1:]] = member
            predictors.append(before[forest.prompt :])
        return predictors

    def experts(self, rows: Sequence[RoutedExperts]) -> list[RoutedExperts]:
        """Of each path [tokens - 1, L, k], from each row's: those of the token before each other."""
        return [
            own[path[1:] - 1] for own, paths in zip(rows, self.paths, strict=True) for path in paths
        ]


def pack(
    prompts: Sequence[Ints],
    responses: Sequence[Ints],
    device: torch.device | str = "cpu",
    tree_training: bool = False,
    needs: RowNeeds = PLAIN,
    experts: Sequence[RoutedExperts] | None = None,
    masks: Sequence[SamplingMask] | None = None,
    forests: Sequence[Forest] | None = None,
) -> PackedBatch:
    """Pack rows; rows whose prompts are equal share it, rows without response take no room.

    Args:
        prompts: Of each row, int64 [P_i], P_i >= 1.
        responses: Of each row, int64 [R_i]; R_i may be 0.
        device: Where the tensors are put; on a CPU attention gets dense buckets, else edges.
        tree_training: Whether rows share all tokens that they begin with alike.
        needs: Of the model.
        experts: Of each row, [P_i + R_i - 1, L, k], the experts of its tokens; of a token that rows
            share, those of the first one that knows them.
        masks: Of each row, the words that its R_i tokens were drawn from. ValueError where a token
            is not among them.
        forests: Of each row, which tokens go on after which. None: each is one path. Where one is
            not, rows share all tokens that their paths begin with alike, as with tree training.
    """
    used = [row for row, response in enumerate(responses) if len(response)]
    used_prompts = [np.asarray(prompts[row]) for row in used]
    used_responses = [np.asarray(responses[row]) for row in used]
    own_experts = None if experts is None else [experts[row] for row in used]
    if forests is None or all(forests[row].one_path for row in used):
        placement = _place_rows(used_prompts, used_responses, tree_training, needs)
        predictors = [
            member[len(prompt) - 1 :]
            for member, prompt in zip(placement.members, used_prompts, strict=False)
        ]
    else:
        sequences = Sequences.of(used_prompts, used_responses, [forests[row] for row in used])
        placement = _place_rows(
            [t[:1] for t in sequences.tokens], [t[1:] for t in sequences.tokens], True, needs
        )
        predictors = sequences.predictors(placement.members)
        own_experts = None if own_experts is None else sequences.experts(own_experts)
    lengths = [len(response) for response in responses]
    routed = _routed(placement, own_experts) if own_experts else None
    return PackedBatch(
        tokens=_tensor([placement.tokens], device),
        positions=_tensor([placement.positions], device),
        layout=_layout(placement, device, needs),
        predictors=_tensor(predictors, device),
        labels=_tensor(used_responses, device),
        rows=Rows.of_lengths(put(torch.tensor(lengths, dtype=torch.int64), device)),
        squares=sum(len(member) ** 2 for member in placement.members),
        whole=sum(map(len, placement.members)),
        distinct=_distinct(predictors, used_responses, device) if tree_training and used else None,
        routed_experts=None if routed is None else put(torch.from_numpy(routed), device),
        support=None
        if masks is None or not used
        else _support(used_responses, [masks[i] for i in used], device),
    )


def _support(
    responses: list[Ints], masks: list[SamplingMask], device: torch.device | str
) -> Support:
    """The words of the R response tokens, of whom none is drawn from others."""
    for response, mask in zip(responses, masks, strict=True):
        mask.check_holds(response)
    counts = np.concatenate([mask.counts for mask in masks])
    return Support(
        tokens=_tensor([np.repeat(np.arange(len(counts)), counts)], device),
        words=_tensor([mask.words.astype(np.int64) for mask in masks], device),
        cut=put(torch.from_numpy(counts > 0), device),
    )


def _routed(placement: _Placement, experts: list[RoutedExperts]) -> npt.NDArray[np.int16]:
    """[T, L, k] of each token."""
    routed = np.full((len(placement.tokens), *experts[0].shape[1:]), -1, np.int16)
    for member, own in zip(reversed(placement.members), reversed(experts), strict=True):
        if len(own) < len(member):
            own = extended(own, len(member))
        ids = as_ids(own[: len(member)])
        known = (ids >= 0).all((1, 2))
        routed[member[known]] = ids[known]
    return routed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placement:
    """Rows' tokens, each that some of them share only once."""

    tokens: Ints  # [T]
    positions: Ints  # [T]
    members: list[Ints]  # of each row, or path: its tokens among the T, but for its last
    shared: tuple[
        int, ...
    ]  # so many of the first tokens are in several rows, and so many after them


def _place_rows(
    prompts: list[Ints], responses: list[Ints], beginnings: bool, needs: RowNeeds
) -> _Placement:
    """Sequences whose equal prompts, or with `beginnings` all equal beginnings, are there once."""
    if not prompts:
        return _NOTHING
    place = _beginnings_once if beginnings else _prompts_once
    if needs.rope_limit is None:
        return place(prompts, responses)
    return _by_length(place, prompts, responses, needs.rope_limit)


Place: TypeAlias = Callable[[list[Ints], list[Ints]], _Placement]
_OTHER = 2**40  # more than any token's number

# A rank with a micro-batch less than others still takes part in the collectives.
_ZERO: Ints = np.zeros(1, dtype=np.int64)
_NOTHING = _Placement(tokens=_ZERO, positions=_ZERO, members=[_ZERO], shared=(0,))


def _by_length(place: Place, prompts: list[Ints], responses: list[Ints], limit: int) -> _Placement:
    """Rows of up to `limit` tokens and longer ones share nothing; positions of these are LONG higher.

    Tokens of long rows are others for `place`, so that it takes none for a short row's.
    """
    lengths = [len(p) + len(r) - 1 for p, r in zip(prompts, responses, strict=True)]
    extra = [_OTHER if length > limit else 0 for length in lengths]
    placement = place(
        [row.astype(np.int64) + more for row, more in zip(prompts, extra, strict=True)],
        [row.astype(np.int64) + more for row, more in zip(responses, extra, strict=True)],
    )
    long = placement.tokens >= _OTHER
    return replace(
        placement,
        tokens=np.where(long, placement.tokens - _OTHER, placement.tokens),
        positions=np.where(long, placement.positions + LONG, placement.positions),
    )


def _prompts_once(prompts: list[Ints], responses: list[Ints]) -> _Placement:
    """Each distinct prompt once, then the rows' responses."""
    bases, owners = _place_prompts(prompts)
    tokens = [prompts[first] for first in owners]
    positions = [np.arange(len(prompt)) for prompt in tokens]
    shared = total = sum(map(len, tokens))
    members = []
    for base, prompt, response in zip(bases, map(len, prompts), responses, strict=True):
        own = len(response) - 1
        tokens.append(response[:-1])
        positions.append(np.arange(prompt, prompt + own))
        members.append(np.concatenate([np.arange(prompt) + base, np.arange(own) + total]))
        total += own
    return _Placement(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        members=members,
        shared=(shared,),
    )


def _beginnings_once(prompts: list[Ints], responses: list[Ints]) -> _Placement:
    """Each token once that rows share with all tokens before it; those of most rows first.

    Tokens of 2 ** k + 1 to 2 ** (k + 1) rows are together, so that a table of all their slots is at
    least half full.
    """
    rows = [np.concatenate([p, r[:-1]]) for p, r in zip(prompts, responses, strict=True)]
    order, common = in_order(rows)
    members: list[Ints] = [_ZERO] * len(rows)
    before, total = _ZERO, 0
    for row, shared in zip(order, common, strict=True):
        own = np.arange(total, total + len(rows[row]) - shared)
        members[row] = before = np.concatenate([before[:shared], own])
        total += len(own)
    tokens, positions = np.zeros(total, np.int64), np.zeros(total, np.int64)
    for own, member in zip(rows, members, strict=True):
        tokens[member], positions[member] = own, np.arange(len(own))
    number = np.bincount(np.concatenate(members), minlength=total)
    kind = np.ceil(np.log2(number)).astype(np.int64)  # 0: of one row alone
    by_kind = np.argsort(-kind, kind="stable")
    place = np.empty(total, dtype=np.int64)
    place[by_kind] = np.arange(total)
    return _Placement(
        tokens=tokens[by_kind],
        positions=positions[by_kind],
        members=[place[member] for member in members],
        shared=tuple(int(n) for n in np.bincount(kind)[:0:-1]),
    )


def _distinct(
    predictors: list[Ints], labels: list[Ints], device: torch.device | str
) -> Distinct | None:
    """Which response tokens are predicted by one token and are the same; None: all differ."""
    words = np.concatenate(labels).astype(np.int64)
    pairs = np.concatenate(predictors) * (words.max() + 1) + words
    _, first, member = np.unique(pairs, return_index=True, return_inverse=True)
    if len(first) == len(pairs):
        return None
    return Distinct(first=_tensor([first], device), member=_tensor([member], device))


def _place_prompts(prompts: Sequence[Ints]) -> tuple[list[int], list[int]]:
    """First token of each row's prompt, and the rows that bring a prompt not seen before."""
    places: dict[bytes, int] = {}
    bases, owners, total = [], [], 0
    for row, prompt in enumerate(prompts):
        key = np.ascontiguousarray(prompt, dtype=np.int64).tobytes()
        if key not in places:
            places[key] = total
            owners.append(row)
            total += len(prompt)
        bases.append(places[key])
    return bases, owners


def _tensor(parts: Sequence[Ints], device: torch.device | str) -> Tensor:
    flat = np.concatenate(parts) if len(parts) else np.zeros(0)
    return put(torch.from_numpy(flat.astype(np.int64)), device)


def put(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device; to a GPU by pinned memory, so that nobody waits for it."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _layout(placement: _Placement, device: torch.device | str, needs: RowNeeds) -> AttentionLayout:
    """Slots of the rows, each whole."""
    members = placement.members
    dense = needs.dense or torch.device(device).type == "cpu"
    order = sorted(range(len(members)), key=lambda i: (-len(members[i]), i))
    lengths = [len(members[i]) for i in order]
    buckets = _buckets(lengths, 0 if needs.whole else SHORTEST_SHARE) if dense else ()
    widths = [bucket.length for bucket in buckets for _ in range(bucket.sequences)] or lengths
    edges = np.concatenate([[0], np.cumsum(widths)])
    spare = int(edges[-1])  # one slot more, of a sequence of its own, whose gradient is zero
    expand = np.zeros(spare + 1, dtype=np.int64)
    collapse = np.zeros(len(placement.tokens), dtype=np.int64)
    for start, i in zip(edges[:-1].tolist(), order, strict=True):
        member = members[i]
        expand[start : start + len(member)] = member
        collapse[member] = np.arange(start, start + len(member))
    slots = np.concatenate(
        [start + np.arange(len(members[i])) for start, i in zip(edges, order, strict=False)]
    )
    bounds = pairwise([0, *np.cumsum(placement.shared).tolist()])
    copies = [_copies(expand[slots], slots, start, stop, spare) for start, stop in bounds]
    return AttentionLayout(
        expand=put(torch.from_numpy(expand), device),
        collapse=put(torch.from_numpy(collapse), device),
        copies=tuple(put(torch.from_numpy(each), device) for each in copies),
        buckets=(*buckets, Bucket(start=spare, sequences=1, length=1)) if dense else (),
        edges=None if dense else put(torch.from_numpy(np.append(edges, spare + 1)).int(), device),
        longest=max(lengths),
    )


def _copies(tokens: Ints, slots: Ints, start: int, stop: int, spare: int) -> Ints:
    """[C, stop - start] the slots of each of these tokens, in their order, then `spare`.

    tokens, slots: [S] of each slot in use, its token and its number.
    """
    count = stop - start
    indices = np.flatnonzero((tokens >= start) & (tokens < stop))
    indices = indices[np.argsort(tokens[indices], kind="stable")]  # by token
    number = np.bincount(tokens[indices] - start, minlength=count)
    place = np.arange(len(indices)) - np.repeat(number.cumsum() - number, number)
    copies = np.full((number.max(initial=0) if count else 1, count), spare, dtype=np.int64)
    copies[place, tokens[indices] - start] = slots[indices]
    return copies


def _buckets(lengths: list[int], share: float) -> tuple[Bucket, ...]:
    """Dense batches of sequences sorted by falling length.

    share: of the longest one's length that each sequence of a batch has at least.
    """
    buckets: list[Bucket] = []
    start = first = 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or lengths[i] < share * lengths[first]:
            buckets.append(Bucket(start=start, sequences=i - first, length=lengths[first]))
            start += (i - first) * lengths[first]
            first = i
    return tuple(buckets)
