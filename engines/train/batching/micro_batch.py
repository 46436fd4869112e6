"""A micro-batch as tensors: rows read from the store and laid end to end, a shared prompt only once.

With tree training everything that rows begin with alike is there only once. While one micro-batch is
used, the next is read, packed and copied. Which rows form one is decided in
engines/train/batching/packing.py; attention over the packed tokens is in
engines/train/model/attention.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from engines.models.routed_experts import OF_PROMPT, OF_RESPONSE, extended
from engines.start_progress import report
from engines.train.batching.image_turns import SeenRow, pack_turns, turns_of
from engines.train.batching.packed_batch import PLAIN, Ints, PackedBatch, RowNeeds, pack, put
from storage.batches.forest import LENGTHS, PARENTS, Forest, forest_of
from storage.batches.refs import BatchRef
from storage.batches.sampling_mask import COUNTS, WORDS, SamplingMask
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
SEEN = ("author", "turn_ids", "frame")  # columns by which rows are packed turn by turn


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
    tree_training: bool = False,
    patches: int = 0,
    needs: RowNeeds = PLAIN,
) -> MicroBatch:
    """Read rows of a batch and pack them.

    Args:
        store: Where the batch's objects are.
        batch: [N] rows with prompt_ids and response_ids; without response_mask every token counts.
        rows: Row numbers; only these are read. May be empty: then nothing is.
        columns: Jagged columns over the response tokens that are wanted too.
        device: Where the tensors are put.
        tree_training: Whether all that rows begin with alike is packed once, or prompts alone.
        patches: Tokens that an image becomes, where the policy looks at images: rows are packed turn
            by turn then (image_turns.py). 0: it does not.
        needs: Of the model.

    Raises:
        ObjectMissing, ObjectDamaged: By the store.
    """
    column_names = list(columns)
    if not rows:
        nothing = {name: _nothing(batch, name) for name in column_names}
        return MicroBatch(
            packed=_pack_turns_read(None, [], patches, device)
            if patches
            else pack([], [], device, needs=needs),
            mask=torch.zeros(0, dtype=torch.bool, device=device),
            columns={name: put(values, device) for name, values in nothing.items()},
        )
    masked = "response_mask" in batch.names
    names = ["prompt_ids", "response_ids", *column_names, *(["response_mask"] if masked else [])]
    names += SEEN if patches else []
    cut = needs.sampling_mask and COUNTS in batch.names
    names += [COUNTS, WORDS] if cut else []
    names += [OF_PROMPT, OF_RESPONSE] if needs.routed_experts else []
    branched = LENGTHS in batch.names
    names += [LENGTHS, PARENTS] if branched else []
    if needs.routed_experts and OF_RESPONSE not in batch.names:
        raise ValueError(
            "train.router_replay = true, and the samples do not have the experts that they were "
            f"sampled with (column {OF_RESPONSE}). Set it to false."
        )
    data = batch.take(rows).fetch(store, names)
    responses = _rows_of(data["response_ids"])
    mask = data["response_mask"].values().bool() if masked else None
    total = sum(map(len, responses))
    if patches:
        packed = _pack_turns_read(data, responses, patches, device)
    else:
        experts = None
        if needs.routed_experts:
            columns_of = (_rows_of(data[name]) for name in ("prompt_ids", OF_PROMPT, OF_RESPONSE))
            experts = [
                np.concatenate([extended(before, len(prompt) - 1), after])
                for prompt, before, after in zip(*columns_of, strict=True)
            ]
        masks = None
        if cut:
            columns_of = (_rows_of(data[name]) for name in (COUNTS, WORDS))
            masks = [
                SamplingMask(counts=counts, words=words)
                for counts, words in zip(*columns_of, strict=True)
            ]
        prompts = _rows_of(data["prompt_ids"])
        forests = _forests(data, prompts, responses) if branched else None
        packed = pack(prompts, responses, device, tree_training, needs, experts, masks, forests)
    return MicroBatch(
        packed=packed,
        mask=put(torch.ones(total, dtype=torch.bool) if mask is None else mask, device),
        columns={name: put(_as_read(name, data[name].values()), device) for name in column_names},
    )


def _forests(data: TensorDict, prompts: list[Ints], responses: list[Ints]) -> list[Forest]:
    """Which tokens go on after which. ValueError where one is trained that nothing predicts."""
    nodes = (_rows_of(data[name]) for name in (LENGTHS, PARENTS))
    forests = [
        forest_of(len(prompt), len(response), lengths, parents)
        for prompt, response, lengths, parents in zip(prompts, responses, *nodes, strict=True)
    ]
    if "response_mask" in data.keys():  # noqa: SIM118
        for forest, response, mask in zip(
            forests, responses, _rows_of(data["response_mask"]), strict=True
        ):
            forest.check_row(len(response), mask)
    return forests


def _pack_turns_read(
    data: TensorDict | None, responses: list[Ints], patches: int, device: torch.device
) -> PackedBatch:
    """Rows of a policy that looks at images, packed turn by turn; None: no rows."""
    if data is None:
        return pack_turns([], patches, device)
    parts = zip(
        _rows_of(data["prompt_ids"]),
        responses,
        _rows_of(data["author"]),
        _rows_of(data["turn_ids"]),
        data["frame"].unbind(),
        strict=True,
    )
    rows = [
        SeenRow(prompt=prompt, response=response, turns=turns_of(authors, turns), frames=frames)
        for prompt, response, authors, turns, frames in parts
    ]
    return pack_turns(rows, patches, device)


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


@contextlib.contextmanager
def read_ahead(
    store: Store,
    batch: BatchRef,
    parts: Sequence[Sequence[int]],
    columns: Sequence[str],
    device: torch.device,
    tree_training: bool = False,
    patches: int = 0,
    needs: RowNeeds = PLAIN,
) -> Iterator[Iterator[MicroBatch]]:
    """The micro-batches of these rows in their order, of which a thread has the next one ready.

    Each is reported as it is taken, so that who looks on knows how far the call is.

    One more than the one in use is held. What the reading of a micro-batch raises is raised where
    that one is asked for; then, and when the body is left early, the thread ends with what it reads.

    Args:
        store: Where the batch's objects are.
        batch: [N] rows.
        parts: Row numbers of each micro-batch; may be empty.
        columns: Jagged columns over the response tokens that are wanted too.
        device: Where the tensors are put. On a GPU they are copied in a queue of their own.
        tree_training, patches, needs: As `read_micro_batch` takes them.
    """
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read_rows(rows: Sequence[int]) -> MicroBatch:
        return read_micro_batch(store, batch, rows, columns, device, tree_training, patches, needs)

    def read(
        rows: Sequence[int], free: torch.cuda.Event | None
    ) -> tuple[MicroBatch, torch.cuda.Event | None]:
        if copies is None:
            return read_rows(rows), None
        with torch.cuda.stream(copies):
            assert free is not None
            # Memory that is let go of may be used again here, but by then not be read any more.
            copies.wait_event(free)
            return read_rows(rows), copies.record_event()

    def done_so_far() -> torch.cuda.Event | None:
        return None if copies is None else torch.cuda.current_stream(device).record_event()

    def micro_batches(thread: ThreadPoolExecutor) -> Iterator[MicroBatch]:
        next_micro = thread.submit(read, parts[0], done_so_far()) if parts else None
        for number, later in enumerate([*parts[1:], None], 1):
            if next_micro is None:
                return
            micro, copied = next_micro.result()
            if copied is not None:
                torch.cuda.current_stream(device).wait_event(copied)
            next_micro = None if later is None else thread.submit(read, later, done_so_far())
            report(f"micro-batch {number} of {len(parts)}")
            yield micro

    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        yield micro_batches(thread)
