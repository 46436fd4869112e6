"""The advantages of a large step, in parts: what is decided once, and what each part does by itself.

A token's work is done in the part that holds it, and whatever is over all samples is made of numbers
by row, added up in the order of the rows. So the batch that comes out is the one that one process
would write, to the bit, however it was cut. Parts lie between groups.

1. `choose` (training_batch.py), once: rewards, shaping, selection, by row. `parts_of` cuts the rest.
2. `write_statistics`, each part, where the estimator compares over the whole batch (Scope.SAMPLES,
   Scope.TOKENS): what each row adds to that.
3. `write_part`, each part: the columns of its tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.advantages import Scope, before_whitening, penalised
from engines.algorithms.aggregation import MetricSums
from engines.algorithms.from_config import advantages_of, estimator_of, reward_kl_of
from engines.algorithms.groups import RowMoments
from engines.algorithms.inputs import AdvantageBatch, Advantages
from engines.algorithms.jagged import Rows
from engines.data.advantage_columns import Chosen, Estimated, estimator_batch, write_columns
from engines.data.column_reading import components, numbers
from engines.data.results import AdvantageParts, PartResult
from engines.data.training_batch import Choice
from storage.batches.columns import SCORE
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

MOST_PARTS = 256  # of a step
SHAPED, MASKED, BASELINE = "reward", "masked", "baseline_reward"  # columns of what was decided
COUNTS, SUMS, SQUARES = "tokens", "sums", "squares"  # columns of the statistics by row


def parts_of(
    store: Store, choice: Choice, algorithm: AlgorithmConfig, part_tokens: int, out_key: str
) -> AdvantageParts | None:
    """Cut the samples that train into parts of about `part_tokens`; None where they are one part.

    One part is also the answer where the estimator wants the whole batch, or corrections that are
    made before the update do. What was decided of each sample is stored under `out_key`.
    """
    chosen = choice.chosen
    scope = scope_in(chosen.samples, algorithm)
    if scope is Scope.BATCH:
        return None
    lengths = chosen.samples.lengths(store, "response_mask")
    groups = numbers(store, chosen.samples, "group_id").numpy()
    edges = part_edges(groups, lengths, part_tokens)
    if len(edges) < 3:
        return None
    columns: dict[str, object] = {SHAPED: chosen.rewards.numpy(), MASKED: chosen.masked.numpy()}
    if chosen.baselines is not None:
        columns[BASELINE] = chosen.baselines.float().numpy()
    for name, part in chosen.components.items():
        columns[f"{SCORE}{name}"] = part.numpy()
    return AdvantageParts(
        samples=chosen.samples,
        rows=write_batch(store, out_key, columns),
        edges=edges,
        measured=scope is not Scope.GROUP,
        result=choice.result(chosen.samples, {}),
    )


def scope_in(samples: BatchRef, algorithm: AlgorithmConfig) -> Scope:
    """What the advantages and corrections of a recipe depend on, with the columns that there are."""
    corrected = algorithm.ratio_against == "old_logprobs" and {
        "old_logprobs",
        "rollout_logprobs",
    } <= set(samples.names)
    # Their metrics, and normalised weights, are over the whole batch.
    return Scope.BATCH if corrected else estimator_of(algorithm)[1]


def part_edges(
    groups: NDArray[np.int64], lengths: NDArray[np.int64], part_tokens: int
) -> tuple[int, ...]:
    """Cuts of N rows into at most MOST_PARTS parts of about `part_tokens`; never within a group.

    Groups [7, 7, 8, 8, 9, 9] of 3 tokens a row, parts of 6: (0, 2, 4, 6).

    Args:
        groups: [N], samples of one prompt share a number; in any order.
        lengths: [N], tokens.
        part_tokens: of a part, but for its last group; more where there would be too many parts.
    """
    count = len(groups)
    budget = max(part_tokens, -(-int(lengths.sum()) // MOST_PARTS))
    _, member = np.unique(groups, return_inverse=True)
    last = np.zeros(member.max(initial=0) + 1, np.int64)
    np.maximum.at(last, member, np.arange(count))
    # A cut after row i is one between groups if no group of the rows so far has a row behind it.
    free = np.maximum.accumulate(last[member]) == np.arange(count)
    edges, taken = [0], 0
    for row, (length, between) in enumerate(zip(lengths.tolist(), free.tolist(), strict=True)):
        taken += length
        if between and (taken >= budget or row == count - 1):
            edges.append(row + 1)
            taken = 0
    return tuple(edges)


def read_chosen(store: Store, samples: BatchRef, rows: BatchRef) -> Chosen:
    """The samples of a part, with what was decided of them."""
    return Chosen(
        samples=samples,
        rewards=numbers(store, rows, SHAPED),
        masked=numbers(store, rows, MASKED),
        components=components(store, rows),
        baselines=numbers(store, rows, BASELINE) if BASELINE in rows.names else None,
    )


def write_statistics(
    store: Store, samples: BatchRef, rows: BatchRef, algorithm: AlgorithmConfig, out_key: str
) -> BatchRef:
    """Store what each row of a part adds to a statistic over the whole batch, [N] each.

    Scope.SAMPLES: `sums`, the sample's reward in all, and `tokens`, those with mask 1.
    Scope.TOKENS: the RowMoments of what is whitened.
    """
    batch, _ = estimator_batch(store, read_chosen(store, samples, rows), algorithm)
    batch, _ = penalised(batch, reward_kl_of(algorithm))
    if scope_in(samples, algorithm) is Scope.SAMPLES:
        columns = {SUMS: batch.totals(), COUNTS: batch.tokens()}
    else:
        raw = before_whitening(batch, algorithm.advantage.arguments())
        kept = batch.rows.kept(batch.mask)
        moments = RowMoments.of(kept.take(raw.advantages), kept.rows)
        columns = {COUNTS: moments.counts, SUMS: moments.sums, SQUARES: moments.squares}
    return write_batch(store, out_key, {name: part.numpy() for name, part in columns.items()})


def write_part(
    store: Store,
    parts: AdvantageParts,
    number: int,
    statistics: BatchRef | None,
    algorithm: AlgorithmConfig,
    out_key: str,
    version: int,
) -> PartResult:
    """Store the columns of a part's tokens (parts are counted from 0).

    statistics: those of all parts in their order, where `parts.measured`.
    """
    samples, rows = parts.part(number)
    chosen = read_chosen(store, samples, rows)
    batch, mismatch = estimator_batch(store, chosen, algorithm)
    scope = scope_in(samples, algorithm)
    if scope is Scope.SAMPLES:
        assert statistics is not None
        start, stop = parts.edges[number : number + 2]
        every = _per_sample(store, parts, statistics, algorithm)[start:stop]
        advantages = batch.at_tokens(every)
        _, metrics = penalised(batch, reward_kl_of(algorithm))
        result = Advantages(advantages=advantages, returns=advantages, metrics=metrics)
    else:
        if scope is Scope.TOKENS:
            assert statistics is not None
            batch = dataclasses.replace(batch, moments=_moments(store, statistics))
        result = advantages_of(batch, algorithm)
    found = Estimated(batch=batch, mismatch=mismatch, result=result)
    written = write_columns(store, chosen, found, algorithm, out_key, version)
    sums, extremes = _metrics(batch, result)
    return PartResult(ref=written, sums=sums, extremes=extremes)


def _per_sample(
    store: Store, parts: AdvantageParts, statistics: BatchRef, algorithm: AlgorithmConfig
) -> Tensor:
    """The advantage of each sample of the step [N], from numbers by row: one token stands for it."""
    rewards = numbers(store, statistics, SUMS)
    one = torch.ones(len(rewards), dtype=torch.int64)
    batch = AdvantageBatch(
        rows=Rows.of_lengths(one),
        mask=one.bool(),
        rewards=rewards,
        groups=numbers(store, parts.samples, "group_id"),
        components=components(store, parts.rows),
        counts=numbers(store, statistics, COUNTS),
    )
    estimator, _ = estimator_of(algorithm)
    return estimator(batch, **algorithm.advantage.arguments()).advantages


def _moments(store: Store, statistics: BatchRef) -> tuple[Tensor, Tensor]:
    """Mean and variance over the tokens of all parts."""
    return RowMoments(
        counts=numbers(store, statistics, COUNTS),
        sums=numbers(store, statistics, SUMS),
        squares=numbers(store, statistics, SQUARES),
    ).combined()


def _metrics(
    batch: AdvantageBatch, result: Advantages
) -> tuple[dict[str, float], dict[str, float]]:
    """What `joined` makes the step's metrics of: sums, and extremes."""
    found = result.advantages.float()[batch.mask].double()
    sums = {
        "tokens": float(found.numel()),
        "advantages": float(found.sum()),
        "advantages_squared": float(found.square().sum()),
    }
    extremes = {}
    if found.numel():
        extremes = {"max": float(found.max()), "negative_min": float(-found.min())}
    if batch.values is not None and result.returns is not None:
        returns = result.returns[batch.mask].double()
        rest = returns - batch.values[batch.mask]
        for name, values in (("returns", returns), ("rest", rest)):
            sums |= {name: float(values.sum()), f"{name}_squared": float(values.square().sum())}
    metrics: MetricSums = result.metrics
    for name, pair in metrics.means.items():
        sums |= {f"mean/{name}": float(pair[0]), f"count/{name}": float(pair[1])}
    sums |= {f"sum/{name}": float(total) for name, total in metrics.sums.items()}
    extremes |= {f"max/{name}": float(value) for name, value in metrics.maxima.items()}
    return sums, extremes
