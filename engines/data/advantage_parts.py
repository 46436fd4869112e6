"""The advantages of a large step, in parts: what is decided once, and what each part does by itself.

A token's work is done in the part that holds it, and whatever is over all samples is made of numbers
by row, added up in the order of the rows. So the batch that comes out is the one that one process
would write, to the bit, however it was cut. Parts lie between groups.

1. `choose` (training_batch.py), once: rewards, shaping, selection, by row. `parts_of` cuts the rest.
2. `write_statistics`, each part, where the estimator compares over the whole batch (Scope.SAMPLES,
   Scope.TOKENS, Scope.TURNS) or corrections are made here: what each row adds to that.
3. `write_part`, each part: the columns of its tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from configs.base import UserFunction
from engines.algorithms.advantages import Scope, before_whitening, penalised
from engines.algorithms.aggregation import Rows
from engines.algorithms.from_config import (
    advantages_of,
    corrections_of,
    estimator_of,
    reward_kl_of,
    with_teacher,
)
from engines.algorithms.group_advantages import RowMoments
from engines.algorithms.inputs import AdvantageBatch, Advantages
from engines.algorithms.rollout_correction import (
    Step,
    correct,
    correction_rows,
    kept_sums,
    mean_weight_columns,
    metrics_of_rows,
    with_mean_weights,
)
from engines.algorithms.token_advantages import among_turns, turns_of
from engines.data.advantages import (
    Estimate,
    TrainingSamples,
    branch_advantages,
    corrects_before_update,
    estimator_batch,
    mismatch_of,
    task_numbers,
    write_columns,
)
from engines.data.column_reading import components, jagged, numbers
from engines.data.contract import AdvantagePartRequest, AdvantageParts, PartResult
from engines.data.training_batch import Choice
from storage.batches.columns import SCORE
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store

MOST_PARTS = 256  # of a step
SHAPED, MASKED, BASELINE = "reward", "masked", "baseline_reward"  # columns of what was decided
COUNTS, SUMS, SQUARES = "tokens", "sums", "squares"  # columns of the statistics by row
RETURNS, STATES = "turn_returns", "turn_states"  # likewise, jagged: each row's turns
CORRECTION = "correction/"  # likewise, before the names of `correction_rows`


def parts_of(
    store: Store, choice: Choice, algorithm: AlgorithmConfig, part_tokens: int, out_key: str
) -> AdvantageParts | None:
    """Cut the samples that train into parts of about `part_tokens`; None where they are one part.

    One part is also the answer where a user's estimator wants the whole batch, or a user's
    correction that is made before the update does. What was decided of each sample is stored under
    `out_key`.
    """
    training = choice.training
    scope = scope_in(training.samples, algorithm)
    if scope is Scope.BATCH:
        return None
    lengths = training.samples.lengths(store, "response_mask")
    groups = numbers(store, training.samples, "group_id").numpy()
    edges = part_edges(groups, lengths, part_tokens)
    if len(edges) < 3:
        return None
    columns: dict[str, object] = {SHAPED: training.rewards.numpy(), MASKED: training.masked.numpy()}
    if training.baselines is not None:
        columns[BASELINE] = training.baselines.float().numpy()
    for name, part in training.components.items():
        columns[f"{SCORE}{name}"] = part.numpy()
    return AdvantageParts(
        samples=training.samples,
        rows=write_batch(store, out_key, columns),
        edges=edges,
        measured=scope is not Scope.GROUP or corrects_before_update(training.samples, algorithm),
        result=choice.result(training.samples, {}),
    )


def scope_in(samples: BatchRef, algorithm: AlgorithmConfig) -> Scope:
    """What the advantages of a recipe depend on; BATCH also where a correction may look at all."""
    users = any(isinstance(step, UserFunction) for step in algorithm.correction)
    if users and corrects_before_update(samples, algorithm):
        return Scope.BATCH
    return estimator_of(algorithm)[1]


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


def read_training(store: Store, samples: BatchRef, rows: BatchRef) -> TrainingSamples:
    """The samples of a part, with what was decided of them."""
    return TrainingSamples(
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
    Scope.TURNS: return and state of each of the row's turns.
    Where corrections are made here: their `correction_rows`.
    """
    training, scope = read_training(store, samples, rows), scope_in(samples, algorithm)
    steps = corrections_of(algorithm)
    mismatch = mismatch_of(store, training, algorithm)
    columns: dict[str, object] = {}
    if mismatch is not None:
        sums = correction_rows(mismatch, steps)
        columns |= {f"{CORRECTION}{name}": values.numpy() for name, values in sums.items()}
    if scope is not Scope.GROUP:
        batch = estimator_batch(store, training, algorithm, mismatch, steps)
        batch, _ = penalised(batch, reward_kl_of(algorithm))
        columns |= _compared(batch, scope, algorithm)
    return write_batch(store, out_key, columns)


def _compared(batch: AdvantageBatch, scope: Scope, algorithm: AlgorithmConfig) -> dict[str, object]:
    """What an estimator of this scope compares over the whole batch, by row."""
    arguments = algorithm.advantage.arguments()
    if scope is Scope.TURNS:
        turns = turns_of(batch, arguments["gamma"])
        offsets = turns.samples.offsets.numpy()
        return {
            RETURNS: Jagged(turns.returns.numpy(), offsets),
            STATES: Jagged(turns.states.numpy(), offsets),
        }
    if scope is Scope.SAMPLES:
        return {SUMS: batch.totals().numpy(), COUNTS: batch.tokens().numpy()}
    raw = before_whitening(algorithm.advantage.kind, batch, arguments)
    counting = batch.rows.kept(batch.mask)
    moments = RowMoments.of(counting.take(raw.advantages), counting.rows)
    return {
        COUNTS: moments.counts.numpy(),
        SUMS: moments.sums.numpy(),
        SQUARES: moments.squares.numpy(),
    }


def write_part(store: Store, request: AdvantagePartRequest, out_key: str) -> PartResult:
    """Store the columns of a part's tokens.

    What the statistics say of the corrections is told by the first part.
    """
    algorithm, statistics = request.algorithm, request.statistics
    samples, rows = request.parts.part(request.number)
    training = read_training(store, samples, rows)
    mismatch = mismatch_of(store, training, algorithm)
    steps = corrections_of(algorithm)
    if mismatch is not None:
        assert statistics is not None
        steps = _with_mean_weights(store, statistics, steps)
    batch = estimator_batch(store, training, algorithm, mismatch, steps)
    result = _estimated(store, request, batch)
    result = with_teacher(result, batch, algorithm)
    estimate = Estimate.of(batch, mismatch, steps, result)
    written = write_columns(store, training, estimate, algorithm, out_key, request.version)
    sums, extremes = _metrics(estimate)
    metrics = {}
    if mismatch is not None and request.number == 0:
        assert statistics is not None
        metrics = _correction_metrics(store, statistics, corrections_of(algorithm))
    return PartResult(ref=written, sums=sums, extremes=extremes, metrics=metrics)


def _estimated(store: Store, request: AdvantagePartRequest, batch: AdvantageBatch) -> Advantages:
    """The advantages of a part, given what its estimator compares over the whole batch."""
    parts, algorithm, statistics = request.parts, request.algorithm, request.statistics
    scope = scope_in(parts.samples, algorithm)
    if scope is Scope.GROUP:
        return branch_advantages(store, parts.part(request.number)[0], batch, algorithm)
    assert statistics is not None
    start, stop = parts.edges[request.number : request.number + 2]
    if scope is Scope.SAMPLES:
        every = _per_sample(store, parts, statistics, algorithm)[start:stop]
        advantages = batch.at_tokens(every)
        _, metrics = penalised(batch, reward_kl_of(algorithm))
        return Advantages(advantages=advantages, returns=advantages, metrics=metrics)
    if scope is Scope.TURNS:
        own = _per_turn(store, statistics, start, stop, algorithm)
        batch = dataclasses.replace(batch, turn_advantages=own)
    else:
        batch = dataclasses.replace(batch, moments=_moments(store, statistics))
    return advantages_of(batch, algorithm)


def _with_mean_weights(
    store: Store, statistics: BatchRef, steps: tuple[Step, ...]
) -> tuple[Step, ...]:
    """The corrections, those that normalise with the mean weight over all parts."""
    columns = mean_weight_columns(steps)
    weights = {name: numbers(store, statistics, f"{CORRECTION}{name}") for name in columns}
    return with_mean_weights(steps, weights)


def _correction_metrics(
    store: Store, statistics: BatchRef, steps: tuple[Step, ...]
) -> dict[str, float]:
    """The metrics of the corrections over all parts."""
    sums = {
        name.removeprefix(CORRECTION): numbers(store, statistics, name)
        for name in statistics.names
        if name.startswith(CORRECTION)
    }
    metrics = metrics_of_rows(sums, steps)
    return {f"{CORRECTION}{name}": value for name, value in metrics.items()}


def _per_turn(
    store: Store, statistics: BatchRef, start: int, stop: int, algorithm: AlgorithmConfig
) -> Tensor:
    """The advantage of each turn of the rows start … stop among the turns of all parts."""
    returns, offsets = jagged(store, statistics, RETURNS)
    states, _ = jagged(store, statistics, STATES)
    arguments = algorithm.advantage.arguments()
    every = among_turns(
        torch.from_numpy(np.array(returns)),
        torch.from_numpy(np.array(states)),
        arguments["normalize"],
        arguments["epsilon"],
    )
    return every[int(offsets[start]) : int(offsets[stop])]


def _per_sample(
    store: Store, parts: AdvantageParts, statistics: BatchRef, algorithm: AlgorithmConfig
) -> Tensor:
    """The advantage of each sample of the step [N], from numbers by row: one token stands for it."""
    rewards = numbers(store, statistics, SUMS)
    lengths = torch.ones(len(rewards), dtype=torch.int64)
    batch = AdvantageBatch(
        rows=Rows.of_lengths(lengths),
        mask=lengths.bool(),
        rewards=rewards,
        groups=torch.from_numpy(parts.samples.own_groups(store)),
        tasks=task_numbers(store, parts.samples),
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


def _metrics(estimate: Estimate) -> tuple[dict[str, float], dict[str, float]]:
    """What `join_parts` makes the step's metrics of: sums, and extremes."""
    batch, result = estimate.batch, estimate.result
    advantages = result.advantages.float()[batch.mask].double()
    sums = {
        "tokens": float(advantages.numel()),
        "advantages": float(advantages.sum()),
        "advantages_squared": float(advantages.square().sum()),
    }
    extremes = {}
    if advantages.numel():
        extremes = {"max": float(advantages.max()), "negative_min": float(-advantages.min())}
    if batch.values is not None and result.returns is not None:
        returns = result.returns[batch.mask].double()
        rest = returns - batch.values[batch.mask]
        for name, values in (("returns", returns), ("rest", rest)):
            sums |= {name: float(values.sum()), f"{name}_squared": float(values.square().sum())}
    added = {"advantage": result.metrics}
    if estimate.mismatch is not None and estimate.steps:
        accepted = correct(estimate.mismatch, estimate.steps)[1]
        added["correction"] = kept_sums(estimate.mismatch, accepted)
    for of, metrics in added.items():
        for name, pair in metrics.means.items():
            sums |= {f"mean/{of}/{name}": float(pair[0]), f"count/{of}/{name}": float(pair[1])}
        sums |= {f"sum/{of}/{name}": float(total) for name, total in metrics.sums.items()}
        extremes |= {f"max/{of}/{name}": float(value) for name, value in metrics.maxima.items()}
    return sums, extremes
