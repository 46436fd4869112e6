"""The metrics of a step, put together from what its tasks returned."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tasks.results import Metrics, Prompts, Scored, Synced, TrainBatch, Updated

if TYPE_CHECKING:
    from tasks.reporting.attempts import Attempt
    from tasks.run.run import Run

STAGES = (
    "prompts",
    "rollout",
    "baseline",
    "reward",
    "logprob",
    "values",
    "advantage",
    "critic_update",
    "update",
    "weight_sync",
    "snapshot",
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
    tokens = sum(shard.sampled.stats.tokens for shard in scored)
    metrics: Metrics = {
        **batch.metrics,
        **updated.metrics,
        **synced.metrics,
        **{f"time/{stage}": seconds for stage, seconds in stages.items()},
        "time/step": time.monotonic() - run.progress.began,
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_second": tokens / max(stages.get("rollout", 0.0), 1e-9),
        "retries": float(sum(attempt.number > 1 for attempt in attempts)),
        "prompts/dropped": float(
            sum(map(len, prompts.dropped.values())) + sum(batch.dropped.values())
        ),
        "prompts/filtered": float(batch.filtered),
        "policy/version": float(updated.version),
        **run.store_usage.since_last(run.engines.cluster),
    }
    return metrics


def stage_seconds(attempts: list[Attempt]) -> dict[str, float]:
    """Stage -> seconds from the start of its first attempt to the end of its last."""
    spans: dict[str, tuple[float, float]] = {}
    for attempt in attempts:
        start, end = spans.get(attempt.stage, (attempt.started, attempt.ended))
        spans[attempt.stage] = (min(start, attempt.started), max(end, attempt.ended))
    return {stage: end - start for stage, (start, end) in spans.items()}
