"""The metrics of a step, put together from what its tasks returned and what the store counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engines.failures import ClusterLost
from engines.rewards.failing_samples import pooled
from engines.workers.host import store_usage
from storage.objects.usage import COUNTER, Usage
from tasks.results import Metrics, Prompts, Scored, Synced, TrainBatch, Updated

if TYPE_CHECKING:
    from engines.workers.cluster import Cluster
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
TIMEOUT = 5.0  # seconds for the workers' answers; a metric is not worth more


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
        "time/step": run.progress.seconds(step),
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


class StoreUsage:
    """Requests and bytes that the flow and every worker asked of the store, since the last look.

    What a worker that died counted after it is lost.
    """

    def __init__(self) -> None:
        self._before: dict[str, Usage] = {"": COUNTER.total()}

    def since_last(self, cluster: Cluster) -> Metrics:
        """Metrics of a step; empty when the workers do not answer in time."""
        try:
            found: dict[str, Usage] = cluster.ask(
                cluster.client.run, store_usage, on_error="ignore", timeout=TIMEOUT
            )
        except (TimeoutError, ClusterLost):  # a commit does not fail for the want of a metric
            return {}
        now = {"": COUNTER.total(), **found}
        total = Usage()
        for process, count in now.items():
            total += count - self._before.get(process, Usage())
        self._before = now
        return {
            "store/requests": float(total.requests),
            "store/bytes_read": float(total.bytes_read),
            "store/bytes_written": float(total.bytes_written),
        }


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
