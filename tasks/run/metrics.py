"""The metrics of a step, put together from what its tasks returned and what the store counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engines.rewards.failing_samples import pooled
from tasks.results import Metrics, Prompts, Scored, Synced, TrainBatch, Updated

if TYPE_CHECKING:
    from tasks.reporting.attempts import Attempt
    from tasks.run.run import Run

STAGES = (
    "prompts",
    "rollout",
    "grow",
    "environment",
    "baseline",
    "reward_model",
    "reward",
    "embedding",
    "progress",
    "teacher",
    "logprob",
    "values",
    "selection",
    "advantage",
    "critic_update",
    "update",
    "weight_sync",
    "snapshot",
    "row_history",
)


def step_metrics(
    run: Run,
    step: int,
    prompts: Prompts,
    scored: list[Scored],
    batch: TrainBatch,
    updated: Updated,
    synced: Synced,
) -> Metrics:
    """Everything that MLflow and the commit record of a step; times in seconds."""
    attempts = run.attempts_of(step)
    stages = stage_seconds(attempts)
    shards = [shard.stats for one in scored for shard in one.sampled]
    tokens, read = sum(shard.tokens for shard in shards), sum(shard.read for shard in shards)
    cached = sum(shard.cached for shard in shards)
    metrics: Metrics = {
        **batch.metrics,
        **updated.metrics,
        **synced.metrics,
        **{f"time/{stage}": seconds for stage, seconds in stages.items()},
        "time/step": run.progress.seconds(step),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_second": tokens / max(stages.get("rollout", 0.0), 1e-9),
        **({"rollout/prefix_cached": cached / read} if read else {}),
        "retries": float(sum(attempt.number > 1 for attempt in attempts)),
        "prompts/dropped": float(
            sum(map(len, prompts.dropped.values())) + sum(batch.dropped.values())
        ),
        **prompts.metrics,
        "prompts/filtered": float(batch.filtered),
        "policy/version": float(updated.version),
        **run.engines.store_usage(),
        **run.engines.turns(),
        **run.engines.asked(),
    }
    return metrics


def stage_seconds(attempts: list[Attempt]) -> dict[str, float]:
    """Stage -> seconds from the start of its first attempt to the end of its last."""
    spans: dict[str, tuple[float, float]] = {}
    for attempt in attempts:
        start, end = spans.get(attempt.stage, (attempt.started, attempt.ended))
        spans[attempt.stage] = (min(start, attempt.started), max(end, attempt.ended))
    return {stage: end - start for stage, (start, end) in spans.items()}


def logged_metrics(scored: list[Scored], taken: Mapping[str, float]) -> Metrics:
    """What reward functions gave to log_metric, under the names that they gave, as TRL logs it.

    Means over the samples (engines.rewards.failing_samples.LoggedMetric). A name that is in `taken`,
    one of the step's own, is put under log_metric/.
    """
    pool = pooled(shard.metrics for shard in scored)
    return {
        f"log_metric/{name}" if name in taken else name: metric.mean
        for name, metric in pool.items()
    }
