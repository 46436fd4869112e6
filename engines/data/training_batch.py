"""From scored samples to the batch that trains: failures, shaping, selection, advantages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from configs.rewards import RewardsConfig
from engines.algorithms.aggregation import Rows
from engines.algorithms.from_config import selection_of, shaped_rewards
from engines.algorithms.reward_shaping import repetition_penalty
from engines.algorithms.sample_selection import Selected, select
from engines.data.advantages import TrainingSamples
from engines.data.column_reading import components, dense, jagged, numbers, policy_tokens
from engines.data.contract import AdvantagesRequest, AdvantagesResult, NothingToTrain, RewardsFailed
from engines.data.sample_metrics import (
    dropped_by_length,
    metrics_of,
    selection_metrics,
    staleness_metrics,
)
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

REPETITION = "repetition_penalty"  # F64 [N]
FAILED, SURPLUS = "reward_failed", "surplus"  # reasons for which groups are dropped, in the ledger
NO_TURN = "no_turn"  # reason for which one is filtered, beside the names of rules
IMPOSSIBLE = -1e30  # a log-prob below it is that of a word whose logit is masked out


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The samples of a step that train, before their advantages."""

    training: TrainingSamples
    trained: int  # groups of which a sample is kept
    filtered: dict[str, int]  # groups left out by the algorithm's selection, by rule
    dropped: dict[str, int]  # groups left out for a failure, or beyond those wanted, by reason
    metrics: dict[str, float]

    @property
    def informative(self) -> int:
        """Groups that would train if there were no bound on their number."""
        return self.trained + self.dropped.get(SURPLUS, 0)

    def check(self) -> None:
        """NothingToTrain where no group came through scoring; what selection leaves may be none."""
        if not self.trained and not self.filtered:
            raise NothingToTrain(
                "Scoring failed for samples of every group of the step, so none of them may train."
            )

    def with_columns(self, store: Store, columns: BatchRef) -> Choice:
        """The same choice, its samples with `columns`, those of the same samples."""
        ids, theirs = (dense(store, ref, "sample_id") for ref in (self.training.samples, columns))
        assert np.array_equal(ids, theirs), "the columns are of other samples than those that train"
        return replace(self, training=replace(self.training, samples=columns))

    def result(self, ref: BatchRef, metrics: dict[str, float]) -> AdvantagesResult:
        """With the batch that trains, and the metrics of its advantages."""
        return AdvantagesResult(
            ref=ref,
            trained=self.trained,
            filtered_by=self.filtered,
            dropped=self.dropped,
            metrics=self.metrics | metrics,
        )


def choose(
    store: Store,
    request: AdvantagesRequest,
    on_failure: RewardsConfig,
    max_new_tokens: int,
    right_from: float = 1.0,
) -> Choice:
    """Choose the samples that train, from numbers by row: no token is read.

    Args:
        store: of the batches.
        request: the step's scored samples; where repetition penalties are made here, their token
            ids are read after all.
        on_failure: what becomes of groups with a failed sample.
        max_new_tokens: longest response, in tokens.
        right_from: reward from which on a sample of one of several tasks is right.

    None may be left, see `Choice.check`. Raises RewardsFailed (rewards.on_failure = abort).
    """
    samples, algorithm, baselines = request.samples, request.algorithm, request.baselines
    prompts, status = dense(store, samples, "group_id"), dense(store, samples, "status")
    groups = samples.own_groups(store)
    per_sample = None if baselines is None else baseline_rewards(store, baselines, samples)
    alone = failed_by_teacher(store, samples)
    failed = (status == SampleStatus.FAILED) | alone
    if per_sample is not None:  # a baseline that could not be scored is no baseline of 0
        failed = failed | np.isnan(per_sample)
    whole = np.flatnonzero(resolve_failures(groups, failed, on_failure.on_failure))
    metrics = metrics_of(store, samples, groups, status, right_from)
    if per_sample is not None:
        metrics["reward/baseline_mean"] = float(np.nanmean(per_sample))
    lost = np.setdiff1d(prompts, prompts[whole])
    by_teacher = len(np.intersect1d(lost, prompts[alone]))
    scored = whole
    if "player" in samples.names:  # one that had no turn has nothing to train
        whole = whole[policy_tokens(store, samples.take(whole)) > 0]
    if request.repetition is not None:
        samples = samples.with_columns(request.repetition)
    shaped = shaped_samples(store, samples.take(whole), algorithm, max_new_tokens)
    rewards = numbers(store, samples.take(whole), "reward")
    rules = selection_of(algorithm)
    selected = select(shaped.rewards, torch.from_numpy(groups[whole]), rules, rewards)
    filtered = filtered_groups(prompts[scored], prompts[whole], selected, [r.name for r in rules])
    selection = np.flatnonzero(selected.keep.numpy())
    informative = np.unique(prompts[whole][selection])  # groups are numbered as they are drawn
    training_groups = informative[: request.most_groups]
    selection = selection[np.isin(prompts[whole][selection], training_groups)]
    index = whole[selection]
    left = {
        "teacher_failed": by_teacher,
        FAILED: len(lost) - by_teacher,
        SURPLUS: len(informative) - len(training_groups),
    }
    training = TrainingSamples(
        samples=samples.take(index).drop([] if request.repetition is None else [REPETITION]),
        rewards=shaped.rewards[selection],
        masked=shaped.masked[selection],
        components={name: part[selection] for name, part in shaped.components.items()},
        baselines=None if per_sample is None else torch.from_numpy(per_sample[index]),
    )
    return Choice(
        training=training,
        trained=len(training_groups),
        filtered=filtered,
        dropped={reason: count for reason, count in left.items() if count},
        metrics=metrics
        | shaped.metrics
        | selection_metrics(selected, sum(filtered.values()))
        | (staleness_metrics(store, training.samples, request.version) if len(index) else {})
        | dropped_by_length(store, samples, request.left_out),
    )


def filtered_groups(
    scored: NDArray[np.int64], whole: NDArray[np.int64], selected: Selected, rules: list[str]
) -> dict[str, int]:
    """Groups of which no sample is kept, by the rule that left out the last ones of them.

    Args:
        scored: group numbers of the samples that came through scoring.
        whole: [N] those among which was selected; fewer where a player had no turn.
        selected: of the N samples.
        rules: names, in the order of `Selected.left_out_by`.
    """
    groups, member = np.unique(whole, return_inverse=True)
    last, keeps = np.full(len(groups), -1), np.zeros(len(groups), bool)
    np.maximum.at(last, member, selected.left_out_by.numpy())
    keeps[member[selected.keep.numpy()]] = True
    by_rule = Counter(rules[rule] for rule in last[~keeps].tolist())
    if unplayed := len(np.setdiff1d(scored, whole)):
        by_rule[NO_TURN] += unplayed
    return dict(by_rule)


def resolve_failures(
    group_ids: np.ndarray, failed: np.ndarray, policy: Literal["drop", "complete", "abort"]
) -> NDArray[np.bool_]:
    """Which of N samples go on after failures of scoring, by rewards.on_failure; bool [N].

    Groups [7, 7, 3, 3] of which the second sample failed: [0, 0, 1, 1] under drop.

    Args:
        group_ids: int64 [N], samples of one prompt share a number.
        failed: bool [N], scoring failed.
        policy: rewards.on_failure.

    drop leaves out each group with a failed sample; complete leaves out failed samples only, and a
    group of which one sample or none is left (its advantage would say nothing); abort raises
    RewardsFailed if any sample failed.
    """
    groups, member = np.unique(group_ids, return_inverse=True)
    if policy == "abort" and failed.any():
        touched = len(np.unique(member[failed]))
        raise RewardsFailed(
            f"Scoring failed for {int(failed.sum())} of {len(failed)} samples, in {touched} of "
            f"{len(groups)} groups, and rewards.on_failure is abort."
        )
    sizes = np.bincount(member, minlength=len(groups))
    left = sizes - np.bincount(member, weights=failed, minlength=len(groups)).astype(np.int64)
    whole = left == sizes
    kept_groups = whole if policy == "drop" else whole | (left > 1)
    keep: NDArray[np.bool_] = kept_groups[member] & ~failed
    return keep


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedSamples:
    """Samples after shaping."""

    rewards: Tensor  # [N]
    masked: Tensor  # bool [N], whose tokens are to have no part in the loss
    components: dict[str, Tensor]  # name -> [N]: the reward functions' parts, and the shaping's
    metrics: dict[str, float]


def shaped_samples(
    store: Store, samples: BatchRef, algorithm: AlgorithmConfig, max_new_tokens: int
) -> ShapedSamples:
    """Apply the recipe's penalties and its rule for truncated samples."""
    shaping = algorithm.shaping
    rewards = numbers(store, samples, "reward")
    truncated = torch.from_numpy(dense(store, samples, "status") == SampleStatus.TRUNCATED)
    shaped = shaped_rewards(
        rewards,
        torch.from_numpy(samples.own_groups(store)),
        torch.from_numpy(policy_tokens(store, samples)),
        truncated,
        shaping,
        max_new_tokens,
        repetition=repetition_of(store, samples, algorithm),
    )
    parts = components(store, samples)
    before = rewards
    if shaping.truncated == "zero":
        parts = {name: torch.where(truncated, 0.0, part) for name, part in parts.items()}
        before = torch.where(truncated, 0.0, before)
    penalties = shaped.rewards - before
    if penalties.any():  # a component of its own for a method that compares them one by one
        parts["shaping"] = penalties
    return ShapedSamples(
        rewards=shaped.rewards,
        masked=truncated & (shaping.truncated == "mask"),
        components=parts,
        metrics={f"shaping/{name}": value for name, value in shaped.metrics.values().items()},
    )


def repetition_of(store: Store, samples: BatchRef, algorithm: AlgorithmConfig) -> Tensor | None:
    """The samples' repetition penalties, float64 [N]; None where the recipe has none.

    Read where they are a column already, else made from the token ids.
    """
    penalty = algorithm.shaping.repetition
    if penalty is None:
        return None
    if REPETITION in samples.names:
        return numbers(store, samples, REPETITION)
    ids, offsets = jagged(store, samples, "response_ids")
    rows = Rows.of_offsets(torch.from_numpy(np.array(offsets)))
    return repetition_penalty(torch.from_numpy(np.array(ids)), rows, **penalty.model_dump())


def write_repetition(
    store: Store, samples: BatchRef, algorithm: AlgorithmConfig, out_key: str
) -> BatchRef:
    """Store the repetition penalties of a part of the samples, before any is chosen."""
    penalties = repetition_of(store, samples, algorithm)
    assert penalties is not None, "the recipe has no repetition penalty"
    return write_batch(store, out_key, {REPETITION: penalties.numpy()})


def failed_by_teacher(store: Store, samples: BatchRef) -> NDArray[np.bool_]:
    """Samples [N] that cannot be learned from, for a log-prob of their teacher's: bool.

    It is not finite, or that of a word that the teacher can never say, with which nothing can be
    reckoned. None where there is no teacher.
    """
    if "teacher_logprobs" not in samples.names:
        return np.zeros(len(samples), bool)
    values, offsets = jagged(store, samples, "teacher_logprobs")
    bad = ~np.isfinite(values) | (values < IMPOSSIBLE)
    return np.diff(np.concatenate([[0], np.cumsum(bad)])[offsets]) > 0


def baseline_rewards(store: Store, baselines: BatchRef, samples: BatchRef) -> NDArray[np.float32]:
    """Reward of the greedy completion of each sample's prompt [N]; NaN where it has none.

    Args:
        store: of the batches.
        baselines: group_id and reward, a row for each prompt, and player, that was completed
            greedily.
        samples: [N], of some of these prompts and players.
    """

    def seats(ref: BatchRef) -> list[tuple[int, ...]]:
        names = [name for name in ("group_id", "player") if name in ref.names]
        return list(zip(*(dense(store, ref, name).tolist() for name in names), strict=True))

    known = dict(zip(seats(baselines), dense(store, baselines, "reward").tolist(), strict=True))
    return np.array([known.get(seat, np.nan) for seat in seats(samples)], dtype=np.float32)
