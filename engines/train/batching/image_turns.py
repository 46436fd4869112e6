"""Rows of a policy that looks at images, as sequences: one for each turn, after the frame before it.

The policy sees the present image and the instruction, not what it did before (OpenVLA). So a row of
several turns is several sequences, of which each has the row's prompt, an image and the turn's own
tokens; what others wrote between them is in none. The advantages are the row's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines.algorithms.aggregation import Rows
from engines.models.vla.openvla import turn
from engines.train.batching.packed_batch import Ints, PackedBatch, pack, put
from storage.batches.columns import Author

# Of a rank without rows: it looks all the same, for the towers are gathered by all.
NO_IMAGE = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRow:
    """A row with what was seen.

    Example: two turns [7, 8] and [9], between which the environment wrote 5
        SeenRow(
            prompt=[1, 4],
            response=[7, 8, 5, 9],
            turns=[0, 0, -1, 1],
            frames=torch.zeros(2, 224, 224, 3, dtype=torch.uint8),
        )
    """

    prompt: Ints  # [P]
    response: Ints  # [R]
    turns: Ints  # [R] turn of each token of the policy; -1 for those of others
    frames: Tensor  # uint8 [turns, H, W, 3]


def turns_of(authors: npt.NDArray[np.uint8], turn_ids: Ints) -> Ints:
    """Turn of each token of the policy, int64 [R]; -1 for tokens of others."""
    return np.where(authors == Author.POLICY, turn_ids, -1)


def pack_turns(
    rows: Sequence[SeenRow], patches: int, device: torch.device | str = "cpu"
) -> PackedBatch:
    """Pack rows turn by turn; turns with equal prompts and images share these.

    In `tokens` the patches of image i are -1 - i patches, -2 - i patches, …; each distinct image
    is in `images` once. Response tokens of others have a place among the R, where anything is
    predicted: they have mask 0.

    Args:
        rows: Any number; those without a token take no room.
        patches: Tokens that an image becomes.
        device: Where the tensors are put.
    """
    prompts: list[Ints] = []
    written: list[Ints] = []
    places: list[Ints] = []  # of their tokens among the R
    numbers: dict[bytes, int] = {}
    images: list[Tensor] = []
    before = 0
    for row in rows:
        for number in np.unique(row.turns[row.turns >= 0]).tolist():
            frame = row.frames[number]
            digest = hashlib.blake2b(frame.numpy().tobytes(), digest_size=16).digest()
            image = numbers.setdefault(digest, len(numbers))
            images += [frame] if image == len(images) else []
            own = np.flatnonzero(row.turns == number)
            prompts.append(np.array(turn(row.prompt.tolist(), [], image, patches), np.int64))
            written.append(row.response[own].astype(np.int64))
            places.append(own + before)
        before += len(row.response)
    apart = pack(prompts, written, device)
    at = put(torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *places])), device)
    nothing = torch.zeros(before, dtype=torch.int64, device=device)
    lengths = torch.tensor([len(row.response) for row in rows], dtype=torch.int64)
    return replace(
        apart,
        predictors=nothing.index_copy(0, at, apart.predictors),
        labels=nothing.index_copy(0, at, apart.labels),
        rows=Rows.of_lengths(put(lengths, device)),
        images=put(torch.stack(images) if images else NO_IMAGE, device),
    )
