"""A micro-batch as tensors: rows read from the store and laid end to end, a shared prompt only once.

Which rows form a micro-batch is decided in engines/train/packing.py; attention over the packed
tokens is in engines/train/attention.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines.algorithms.jagged import Rows
from engines.train.attention import AttentionLayout, Bucket
from storage.batches.refs import BatchRef
from storage.objects.store import Store

# Columns over the response tokens that a policy's loss or metrics are made of, where there are such.
PER_TOKEN = (
    "advantages",
    "old_logprobs",
    "rollout_logprobs",
    "staleness",
    "ref_logprobs",
    "correction_weights",
    "correction_kept",
    "teacher_logprobs",
    "teacher_topk_ids",
    "teacher_topk_logprobs",
    "teacher_tail_logprobs",
)
SHORTEST_SHARE = 0.75  # a bucket holds sequences of at least this share of its longest one's length

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """What a forward pass over some rows needs: T tokens in, numbers of R response tokens out.

    Rows that share a prompt share its tokens. The last token of a row is only ever a label.

    Example: prompt [5, 6] with the responses [7, 8, 9] and [4]
        tokens     = [5, 6, 7, 8]  # the prompt once, the first response without its last token
        positions  = [0, 1, 2, 3]
        predictors = [1, 2, 3, 1]  # token 6 predicts 7, 7 predicts 8, 8 predicts 9; 6 predicts 4
        labels     = [7, 8, 9, 4]
        rows       = offsets [0, 3, 4]
        squares    = 4 * 4 + 2 * 2
    """

    tokens: Tensor  # [T] int64: distinct prompts, then each row's response but for its last token
    positions: Tensor  # [T] int64: position of each token in its sequence
    layout: AttentionLayout  # of the T tokens in their sequences
    predictors: Tensor  # [R] int64: the token whose hidden state predicts each response token
    labels: Tensor  # [R] int64: response tokens of all rows
    rows: Rows  # where the R response tokens of each row begin and end; rows may be empty
    squares: int  # sum of squared sequence lengths, for the count of FLOPs


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Rows ready for a forward pass and a loss; R response tokens in the order of the rows."""

    packed: PackedBatch  # T tokens, R response tokens
    mask: Tensor  # bool [R]; True where the policy wrote the token
    # [R] or [R, k] each: those that were asked for, by name; float32, token ids int64
    columns: dict[str, Tensor]

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass, T."""
        return self.packed.tokens.numel()


def read_micro_batch(
    store: Store,
    batch: BatchRef,
    rows: Sequence[int],
    columns: Iterable[str],
    device: torch.device,
) -> MicroBatch:
    """Read rows of a batch and pack them.

    Args:
        store: Where the batch's objects are.
        batch: [N] rows with prompt_ids and response_ids; without response_mask every token counts.
        rows: Row numbers; only these are read. May be empty: then nothing is.
        columns: Jagged columns over the response tokens that are wanted too.
        device: Where the tensors are put.

    Raises:
        ObjectMissing, ObjectDamaged: By the store.
    """
    wanted = list(columns)
    if not rows:
        nothing = {name: _nothing(batch, name) for name in wanted}
        return MicroBatch(
            packed=pack([], [], device),
            mask=torch.zeros(0, dtype=torch.bool, device=device),
            columns={name: put(values, device) for name, values in nothing.items()},
        )
    masked = "response_mask" in batch.names
    names = ["prompt_ids", "response_ids", *wanted, *(["response_mask"] if masked else [])]
    data = batch.take(rows).fetch(store, names)
    responses = _rows_of(data["response_ids"])
    mask = data["response_mask"].values().bool() if masked else None
    total = sum(map(len, responses))
    return MicroBatch(
        packed=pack(_rows_of(data["prompt_ids"]), responses, device),
        mask=put(torch.ones(total, dtype=torch.bool) if mask is None else mask, device),
        columns={name: put(_as_read(name, data[name].values()), device) for name in wanted},
    )


def _as_read(name: str, values: Tensor) -> Tensor:
    """Values of a column in the number format of the loss."""
    return values.long() if name.endswith("_ids") else values.float()


def _nothing(batch: BatchRef, name: str) -> Tensor:
    """The values of no rows of a column."""
    return _as_read(name, torch.zeros(0, *batch.column(name).shape))


def _rows_of(column: Tensor) -> list[np.ndarray]:
    """The rows of a nested tensor [N, jagged] as arrays."""
    values, offsets = column.values().numpy(), column.offsets().numpy()  # type: ignore[attr-defined]
    return [values[start:stop] for start, stop in pairwise(offsets)]


def pack(
    prompts: Sequence[Ints], responses: Sequence[Ints], device: torch.device | str = "cpu"
) -> PackedBatch:
    """Pack rows; rows whose prompts are equal share it, rows without response take no room.

    Args:
        prompts: Of each row, int64 [P_i], P_i >= 1.
        responses: Of each row, int64 [R_i]; R_i may be 0.
        device: Where the tensors are put; on a CPU attention gets dense buckets, else edges.
    """
    used = [row for row, response in enumerate(responses) if len(response)]
    bases, owners = _place_prompts([prompts[row] for row in used])
    tokens = [np.asarray(prompts[used[first]]) for first in owners]
    positions = [np.arange(len(prompt)) for prompt in tokens]
    total = sum(map(len, tokens))
    shared, members, predictors = total, [], []
    for number, row in enumerate(used):
        prompt, response = len(prompts[row]), len(responses[row])
        indices = np.concatenate(
            [np.arange(prompt) + bases[number], np.arange(response - 1) + total]
        )
        tokens.append(np.asarray(responses[row][:-1]))
        positions.append(np.arange(prompt, prompt + response - 1))
        members.append(indices)
        predictors.append(indices[prompt - 1 :])
        total += response - 1
    # A rank with a micro-batch less than others still takes part in the collectives.
    if not used:
        zero = np.zeros(1, dtype=np.int64)
        tokens, positions, members, total = [zero], [zero], [zero], 1
    lengths = [len(response) for response in responses]
    return PackedBatch(
        tokens=_tensor(tokens, device),
        positions=_tensor(positions, device),
        layout=_layout([m.astype(np.int64) for m in members], total, shared, device),
        predictors=_tensor(predictors, device),
        labels=_tensor([responses[row] for row in used], device),
        rows=Rows.of_lengths(put(torch.tensor(lengths, dtype=torch.int64), device)),
        squares=int(sum(len(m) ** 2 for m in members)),
    )


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


def _layout(
    members: list[Ints], total: int, shared: int, device: torch.device | str
) -> AttentionLayout:
    """Slots of sequences given the tokens of each; the first `shared` tokens may be in several."""
    dense = torch.device(device).type == "cpu"
    order = sorted(range(len(members)), key=lambda i: (-len(members[i]), i))
    lengths = [len(members[i]) for i in order]
    buckets = _buckets(lengths) if dense else ()
    widths = [bucket.length for bucket in buckets for _ in range(bucket.sequences)] or lengths
    edges = np.concatenate([[0], np.cumsum(widths)])
    spare = int(edges[-1])  # one slot more, of a sequence of its own, whose gradient is zero
    expand = np.zeros(spare + 1, dtype=np.int64)
    collapse = np.zeros(total, dtype=np.int64)
    for start, i in zip(edges[:-1].tolist(), order, strict=True):
        member = members[i]
        expand[start : start + len(member)] = member
        collapse[member] = np.arange(start, start + len(member))
    slots = np.concatenate(
        [start + np.arange(len(members[i])) for start, i in zip(edges, order, strict=False)]
    )
    copies = _copies(expand[slots], slots, shared, spare)
    return AttentionLayout(
        expand=put(torch.from_numpy(expand), device),
        collapse=put(torch.from_numpy(collapse), device),
        copies=put(torch.from_numpy(copies), device),
        buckets=(*buckets, Bucket(start=spare, sequences=1, length=1)) if dense else (),
        edges=None if dense else put(torch.from_numpy(np.append(edges, spare + 1)).int(), device),
        longest=max(lengths),
    )


def _copies(tokens: Ints, slots: Ints, shared: int, spare: int) -> Ints:
    """[C, shared] the slots of each of the first `shared` tokens, in their order, then `spare`.

    tokens, slots: [S] of each slot in use, its token and its number.
    """
    first = np.flatnonzero(tokens < shared)
    first = first[np.argsort(tokens[first], kind="stable")]  # by token
    number = np.bincount(tokens[first], minlength=shared)
    place = np.arange(len(first)) - np.repeat(number.cumsum() - number, number)
    copies = np.full((number.max(initial=0) if shared else 1, shared), spare, dtype=np.int64)
    copies[place, tokens[first]] = slots[first]
    return copies


def _buckets(lengths: list[int]) -> tuple[Bucket, ...]:
    """Dense batches of sequences sorted by falling length."""
    found: list[Bucket] = []
    start = first = 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or lengths[i] < SHORTEST_SHARE * lengths[first]:
            found.append(Bucket(start=start, sequences=i - first, length=lengths[first]))
            start += (i - first) * lengths[first]
            first = i
    return tuple(found)
