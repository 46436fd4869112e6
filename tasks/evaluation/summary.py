"""From the scores of an evaluation's samples to its metrics. Failed samples are in no mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.evaluation import SuiteConfig
from engines.algorithms.evaluation import PairedTest, bootstrap, paired_test, pass_at_k, wilson
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.evaluations.results import ConfidenceInterval, EvaluationResult
from storage.objects.store import Store
from tasks.results import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """The scored samples of an evaluation by prompt; P prompts of which one could be scored."""

    groups: NDArray[np.int64]  # [P] rows of the prompts, ascending
    means: NDArray[np.float64]  # [P] mean reward of each
    samples: NDArray[np.int64]  # [P] scored samples of each
    right: NDArray[np.int64]  # [P] of them, with a reward of right_from or more
    binary: bool  # whether all rewards are 0 or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A version against one of another run, in a suite."""

    suite: str
    version: int
    against: int  # the other run's version
    found: PairedTest


def scores_of(store: Store, samples: BatchRef, right_from: float) -> PromptScores:
    """Read what was scored: of an episode's players those that the policy played."""
    ref = samples.of_policy(store)
    rewards = ref.fetch_numpy(store, "reward")[0].astype(np.float64)
    groups = ref.fetch_numpy(store, "prompt_row")[0]
    scored = ~np.isnan(rewards)
    return _by_prompt(rewards[scored], groups[scored], right_from)


def _by_prompt(
    rewards: NDArray[np.float64], groups: NDArray[np.int64], right_from: float
) -> PromptScores:
    """rewards, groups: [N] of the scored samples."""
    numbers, place = np.unique(groups, return_inverse=True)
    counts = np.bincount(place, minlength=len(numbers))
    right = np.bincount(place[rewards >= right_from], minlength=len(numbers))
    sums = np.bincount(place, weights=rewards, minlength=len(numbers))
    return PromptScores(
        groups=numbers,
        means=sums / np.maximum(counts, 1),
        samples=counts,
        right=right,
        binary=bool(np.isin(rewards, (0.0, 1.0)).all()),
    )


def counts_of(store: Store, samples: BatchRef) -> dict[str, float]:
    """Samples, failed and truncated ones, and mean response tokens."""
    ref = samples.of_policy(store)
    rewards, status = (ref.fetch_numpy(store, name)[0] for name in ("reward", "status"))
    lengths = ref.lengths(store, "response_ids")
    return {
        "samples": float(len(rewards)),
        "failed": float(np.isnan(rewards).sum()),
        "truncated": float((status == SampleStatus.TRUNCATED).sum()),
        "tokens": float(lengths.mean()),
    }


def metrics_of(
    scores: PromptScores, suite: SuiteConfig
) -> tuple[dict[str, float], dict[str, ConfidenceInterval]]:
    """The metrics of docs/evaluation.md that come from scores, and intervals; none without scores."""
    prompts = len(scores.means)
    if not prompts:
        return {}, {}
    interval = interval_of(scores)
    metrics = {
        "reward": float(scores.means.mean()),
        "error": float(scores.means.std() / math.sqrt(prompts)),
        "reward_low": interval.low,
        "reward_high": interval.high,
        f"mean@{suite.samples}": float((scores.right / scores.samples).mean()),
    }
    for k in suite.pass_at:
        enough = scores.samples >= k
        if enough.any():
            metrics[f"pass@{k}"] = pass_at_k(scores.samples[enough], scores.right[enough], k)
    return metrics, {"reward": interval}


def evaluation_metrics(result: EvaluationResult) -> Metrics:
    """The metrics of an evaluation under the names that people see."""
    cost = {f"cost/{name}": value for name, value in result.cost.items()}
    return {f"eval/{result.suite}/{name}": value for name, value in (result.metrics | cost).items()}


def interval_of(scores: PromptScores) -> ConfidenceInterval:
    """That of the mean reward: of a proportion where each prompt has one sample, right or wrong."""
    if scores.binary and (scores.samples == 1).all():
        low, high = wilson(int(scores.means.sum()), len(scores.means))
        return ConfidenceInterval(low=low, high=high, kind="wilson")
    low, high = bootstrap(scores.means)
    return ConfidenceInterval(low=low, high=high, kind="bootstrap")


def paired(
    first: PromptScores, second: PromptScores
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean rewards of the prompts that both have scores of, [P] each, in the same order."""
    _, a, b = np.intersect1d(first.groups, second.groups, return_indices=True)
    return first.means[a], second.means[b]


def tested(store: Store, first: EvaluationResult, second: EvaluationResult) -> PairedTest | None:
    """Two evaluations of the same rows, prompt by prompt; None where no prompt has scores in both."""
    pairs = paired(
        *(scores_of(store, result.samples, result.right_from) for result in (first, second))
    )
    return paired_test(*pairs) if len(pairs[0]) else None


def sentence(name: str, version: int, metrics: dict[str, float]) -> str:
    """A result in a line, for people."""
    if "reward" not in metrics:
        return f"evaluation {version}  {name}: none of {metrics['samples']:.0f} samples was scored"
    parts = [
        f"reward {metrics['reward']:.4f} "
        f"({metrics['reward_low']:.4f} to {metrics['reward_high']:.4f})"
    ]
    parts += [f"{key} {value:.4f}" for key, value in metrics.items() if key.startswith("pass@")]
    parts += [f"failed {metrics['failed']:.0f}"] if metrics["failed"] else []
    return f"evaluation {version}  {name}: {', '.join(parts)}"
