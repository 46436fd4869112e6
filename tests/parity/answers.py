"""What all adapters share: shaping results like the reference's, gradients, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engines.aggregation import Normaliser
from engines.jagged import Rows
from tests.parity.vectors import Case

Answer = Mapping[str, Any]  # output name -> tensor, number, list, or metrics by name
Adapter = Callable[[Case], Answer]


def shaped(values: Tensor, case: Case, like: str = "response_mask") -> Tensor:
    """Flat values as the matrix that the input `like` is."""
    return values.reshape(torch.tensor(case.inputs[like]).shape)


def leaf(values: Tensor) -> Tensor:
    """A copy that collects a gradient."""
    return values.clone().requires_grad_(True)


def normaliser(case: Case, mask: Tensor, rows: Rows, counts: Mapping[str, Any]) -> Normaliser:
    """The counts that a case gives, else those of its own batch.

    ValueError where there are several ranks and no counts of all of them.
    """
    ranks = counts.get("dp_size", 1)
    given = {"batch_num_tokens", "global_batch_size"} & counts.keys()
    own = Normaliser.of(mask, rows, counts.get("loss_scale_factor"), 1 if given else ranks)
    return Normaliser(
        tokens=counts.get("batch_num_tokens", own.tokens),
        sequences=counts.get("global_batch_size", own.sequences),
        rows=counts.get("global_batch_size", own.rows),
        max_tokens=own.max_tokens,
        ranks=ranks,
    )


def group_numbers(ids: list[Any]) -> Tensor:
    """Numbers or strings as group numbers."""
    names = {name: number for number, name in enumerate(dict.fromkeys(ids))}
    return torch.tensor([names[name] for name in ids])
