"""Random batches for property tests, and the same batch split, permuted or padded."""

from __future__ import annotations

import dataclasses
from operator import attrgetter

import torch
from torch import Tensor

from engines.algorithms.aggregation import Rows
from engines.algorithms.inputs import AdvantageBatch, PolicyBatch

TOKEN_FIELDS = (
    "mask",
    "logprobs",
    "advantages",
    "old_logprobs",
    "rollout_logprobs",
    "staleness",
    "ref_logprobs",
    "entropy",
    "weights",
    "kept",
    "selected",
    "counted",
)
ADVANTAGE_TOKEN_FIELDS = (
    "mask",
    "token_rewards",
    "values",
    "logprobs",
    "ref_logprobs",
    "sum_pi_squared",
    "correction_weights",
    "steps",
    "states",
)
ADVANTAGE_ROW_FIELDS = ("rewards", "groups", "baselines")


def random_rows(seed: int, count: int, longest: int = 7) -> tuple[Rows, Tensor, torch.Generator]:
    """Ragged rows with an empty one, masked tokens inside some, and a generator to go on with."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    if count > 2:
        lengths[count // 2] = 0
    rows = Rows.of_lengths(lengths)
    mask = torch.rand(rows.ids.numel(), generator=generator) > 0.25
    return rows, mask, generator


def policy_batch(seed: int, count: int = 6, dtype: torch.dtype = torch.float64) -> PolicyBatch:
    """Every column filled; logprobs and entropy are leaves."""
    rows, mask, generator = random_rows(seed, count)

    def normal(scale: float) -> Tensor:
        return (torch.randn(mask.numel(), generator=generator, dtype=torch.float64) * scale).to(
            dtype
        )

    base = -normal(1.0).abs() - 0.05
    return PolicyBatch(
        rows=rows,
        mask=mask,
        logprobs=base.clone().requires_grad_(True),
        advantages=normal(1.0),
        old_logprobs=base + normal(0.25),
        rollout_logprobs=base + normal(0.25),
        ref_logprobs=base + normal(0.5),
        entropy=normal(1.0).abs().requires_grad_(True),
    )


def rows_of(batch: PolicyBatch, wanted: list[int]) -> PolicyBatch:
    """Some rows of a batch, in the order wanted."""
    index = token_index(batch.rows, wanted)
    picked = {
        name: value[index] for name in TOKEN_FIELDS if (value := vars_of(batch)[name]) is not None
    }
    return dataclasses.replace(
        batch,
        rows=Rows.of_lengths(batch.rows.lengths[torch.tensor(wanted, dtype=torch.long)]),
        **picked,
    )


def token_index(rows: Rows, wanted: list[int]) -> Tensor:
    """Positions of the tokens of some rows."""
    parts = [torch.arange(int(rows.offsets[i]), int(rows.offsets[i + 1])) for i in wanted]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)


def vars_of(carrier: PolicyBatch | AdvantageBatch) -> dict[str, Tensor | None]:
    """Field name -> value."""
    return {f.name: attrgetter(f.name)(carrier) for f in dataclasses.fields(carrier)}


def padded(
    carrier: PolicyBatch | AdvantageBatch, names: tuple[str, ...], width: int, junk: float
) -> tuple[PolicyBatch | AdvantageBatch, Tensor]:
    """The batch as a padded matrix with `junk` in the padding, and the places of its tokens."""
    rows = carrier.rows
    place = rows.ids * width + rows.within()
    columns = {}
    for name in names:
        value = vars_of(carrier)[name]
        if value is None:
            continue
        blank = False if value.dtype == torch.bool else (junk if value.is_floating_point() else 0)
        full = torch.full((rows.count * width,), blank, dtype=value.dtype)
        columns[name] = full.index_copy(0, place, value)
    return dataclasses.replace(carrier, rows=Rows.padded(rows.count, width), **columns), place


def advantage_batch(
    seed: int, count: int = 8, dtype: torch.dtype = torch.float64, groups: int = 3
) -> AdvantageBatch:
    """Every column filled; groups of several sizes; a turn is two tokens."""
    rows, mask, generator = random_rows(seed, count)
    total = mask.numel()

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)

    rewards = torch.randint(0, 4, (count,), generator=generator).to(dtype)
    return AdvantageBatch(
        rows=rows,
        mask=mask,
        rewards=rewards,
        groups=torch.randint(0, groups, (count,), generator=generator) * 7 - 3,
        values=uniform(total),
        logprobs=-uniform(total) - 0.1,
        ref_logprobs=-uniform(total) - 0.1,
        sum_pi_squared=uniform(total),
        correction_weights=uniform(total) + 0.5,
        baselines=uniform(count),
        steps=rows.within() // 2,
        states=torch.randint(0, 2, (total,), generator=generator)[
            (rows.offsets[:-1][rows.ids] + rows.within() // 2 * 2)
        ],
        components={"a": rewards, "b": uniform(count)},
    )
