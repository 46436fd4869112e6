"""The rows of one micro-batch: read from the store, packed, with their columns per response token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engines.packed import PackedBatch, pack
from engines.packing import Lengths
from storage.refs import BatchRef
from storage.store import Store

PER_TOKEN = (
    "advantages",
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "correction_weights",
    "correction_kept",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Rows ready for a forward pass and a loss; R response tokens in the order of the rows."""

    packed: PackedBatch
    mask: Tensor  # bool [R]
    columns: dict[str, Tensor]  # float32 [R] each: those that were asked for

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass."""
        return self.packed.tokens.numel()


def read_micro_batch(
    store: Store,
    batch: BatchRef,
    rows: Sequence[int],
    columns: Iterable[str],
    device: torch.device,
) -> MicroBatch:
    """Read the given rows and no others. `rows` may be empty: then nothing is read."""
    wanted = list(columns)
    if not rows:
        nothing = torch.zeros(0, device=device)
        return MicroBatch(
            packed=pack([], [], device),
            mask=nothing.bool(),
            columns=dict.fromkeys(wanted, nothing),
        )
    masked = "response_mask" in batch.names
    names = ["prompt_ids", "response_ids", *wanted, *(["response_mask"] if masked else [])]
    data = batch.take(rows).fetch(store, names)
    responses = _rows_of(data["response_ids"])
    mask = data["response_mask"].values().bool() if masked else None
    total = sum(map(len, responses))
    return MicroBatch(
        packed=pack(_rows_of(data["prompt_ids"]), responses, device),
        mask=(torch.ones(total, dtype=torch.bool) if mask is None else mask).to(device),
        columns={name: data[name].values().float().to(device) for name in wanted},
    )


def read_lengths(store: Store, batch: BatchRef) -> Lengths:
    """What plans are made from; reads row indices and the group numbers."""
    groups = None
    if "group_id" in batch.names:
        groups = batch.fetch_numpy(store, "group_id")[0].astype(np.int64)
    return Lengths(
        prompts=batch.lengths(store, "prompt_ids"),
        responses=batch.lengths(store, "response_ids"),
        groups=groups,
    )


def read_mask_counts(store: Store, batch: BatchRef, rows: Sequence[int]) -> tuple[int, int, int]:
    """Tokens with mask 1, rows with at least one such token, and rows, among the given rows."""
    if not rows:
        return 0, 0, 0
    taken = batch.take(rows)
    if "response_mask" not in batch.names:
        lengths = taken.lengths(store, "response_ids")
        return int(lengths.sum()), int((lengths > 0).sum()), len(rows)
    values, offsets = taken.fetch_numpy(store, "response_mask")
    assert offsets is not None
    counts = [int(values[start:stop].astype(bool).sum()) for start, stop in pairwise(offsets)]
    return sum(counts), sum(count > 0 for count in counts), len(rows)


def _rows_of(column: Tensor) -> list[np.ndarray]:
    """The rows of a nested tensor [N, jagged] as arrays."""
    values, offsets = column.values().numpy(), column.offsets().numpy()  # type: ignore[attr-defined]
    return [values[start:stop] for start, stop in pairwise(offsets)]
