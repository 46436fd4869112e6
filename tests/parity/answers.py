"""What all adapters share: shaping results like the reference's, gradients, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.aggregation import Normaliser, Rows
from tests.parity.vectors import Case

Answer = Mapping[str, Any]  # output name -> tensor, number, list, or metrics by name
Adapter = Callable[[Case], Answer]


def shaped(values: Tensor, case: Case, like: str = "response_mask") -> Tensor:
    """Flat values as the matrix that the input `like` is."""
    return values.reshape(torch.tensor(case.inputs[like]).shape)


def leaf(values: Tensor) -> Tensor:
    """A copy that collects a gradient."""
    return values.clone().requires_grad_(True)


def normaliser(mask: Tensor, rows: Rows, counts: Mapping[str, Any], mode: str) -> Normaliser:
    """The counts that a case gives, else those of its own batch.

    ValueError where there are several ranks and the mode's count is not that of all of them.
    """
    given = {name: value for name, value in counts.items() if value is not None}
    ranks = given.get("dp_size", 1)
    needed = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    known = needed in given or mode == "token-sum"
    own = Normaliser.of(mask, rows, given.get("loss_scale_factor"), 1 if known else ranks)
    return Normaliser(
        tokens=given.get("batch_num_tokens", own.tokens),
        sequences=given.get("global_batch_size", own.sequences),
        rows=given.get("global_batch_size", own.rows),
        max_tokens=own.max_tokens,
        ranks=ranks,
    )


def mode_of(case: Case) -> str:
    """The case's aggregation; verl's default where it does not say."""
    return case.params.get("loss_agg_mode", "token-mean")


def group_numbers(ids: list[Any]) -> Tensor:
    """Numbers or strings as group numbers."""
    names = {name: number for number, name in enumerate(dict.fromkeys(ids))}
    return torch.tensor([names[name] for name in ids])
