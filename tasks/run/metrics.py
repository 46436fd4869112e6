"""The metrics of a step, put together from what its tasks returned and what the store counted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from configs.grpo import GRPOConfig
from engines.rewards.runner import pooled
from storage.runs.commit_log import Commit
from storage.runs.live import read_end
from storage.tracking.cost import AttemptCost, Pool, Used, step_cost, window_of
from tasks.results import Metrics, Prompts, Scored, Synced, TrainBatch, Updated
from tasks.run.attempts import Attempt

if TYPE_CHECKING:
    from tasks.run.run import Run


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
    attempts = run.attempts.of(step)
    stages = stage_seconds(attempts)
    shards = [shard.stats for part in scored for shard in part.sampled]
    tokens, read = sum(shard.tokens for shard in shards), sum(shard.read for shard in shards)
    cached = sum(shard.cached for shard in shards)
    fullest = max(
        (stats.cache_use for stats in shards if stats.cache_use is not None), default=None
    )
    metrics: Metrics = {
        **batch.metrics,
        **updated.metrics,
        **synced.metrics,
        **{f"time/{stage}": seconds for stage, seconds in stages.items()},
        "time/step": run.clock.seconds(step),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_second": tokens / max(stages.get("rollout", 0.0), 1e-9),
        **({"rollout/prefix_cached": cached / read} if read else {}),
        **({} if fullest is None else {"rollout/cache_full": fullest}),
        **({"episode/at_once": run.episodes.at_once} if run.config.plays_apart else {}),
        "retries": float(sum(attempt.number > 1 for attempt in attempts)),
        "prompts/dropped": float(
            sum(map(len, prompts.dropped.values())) + sum(batch.dropped.values())
        ),
        **prompts.metrics,
        "prompts/filtered": float(batch.filtered),
        "policy/version": float(updated.version),
        **run.engines.metrics(),
    }
    return metrics | cost_of(run, step, time.time(), sum(len(shard.ref) for shard in scored))


def numbers_of(commit: Commit) -> Metrics:
    """The metrics of a committed step that are numbers."""
    return {name: value for name, value in commit.metrics.items() if value is not None}


def cost_at_end(run: Run) -> Metrics:
    """The metrics cost/… of what follows the last commit, up to now or to the end of the workers."""
    run.attempts.charge(run.after)
    return cost_of(run, run.after, run.engines.ended or time.time(), samples=0)


def cost_of(run: Run, step: int, now: float, samples: int) -> Metrics:
    """The metrics cost/… of a step that is committed `now`; samples: those that it scored."""
    config, last, died = run.config, run.last, run.lease.died
    pools = pools_of(config)
    used = {
        name: Used(cpu_seconds=spent.cpu_seconds, joules=spent.joules, busy=spent.busy)
        for name, spent in run.engines.spent().items()
        if name in pools
    }
    committed_at = None if last is None or run.head == run.start else last.committed_at
    before = {} if last is None else last.metrics
    if (
        committed_at is None or committed_at <= run.engines.launched
    ):  # nothing of this flow's is committed
        end = read_end(run.files)
        before = before | (end.cost if end is not None and end.step == run.head else {})
    return step_cost(
        [AttemptCost.of(attempt.record()) for attempt in run.attempts.of(step)],
        window_of(
            run.engines.launched,
            committed_at,
            now,
            None if died is None else (died.started, died.last_seen),
        ),
        pools,
        used,
        before,
        samples,
    )


def pools_of(config: GRPOConfig) -> dict[str, Pool]:
    """The devices of the pools that a run uses, by name."""
    pools = {name: config.cluster.pools[name] for name in sorted(config.used_pools)}
    return {
        name: Pool(workers=pool.workers, gpus=pool.gpus, price_per_hour=pool.price_per_hour)
        for name, pool in pools.items()
    }


def stage_seconds(attempts: list[Attempt]) -> dict[str, float]:
    """Stage -> seconds from the start of its first attempt to the end of its last."""
    spans: dict[str, tuple[float, float]] = {}
    for attempt in attempts:
        start, end = spans.get(attempt.stage, (attempt.started, attempt.ended))
        spans[attempt.stage] = (min(start, attempt.started), max(end, attempt.ended))
    return {stage: end - start for stage, (start, end) in spans.items()}


def logged_metrics(scored: list[Scored], own_metrics: Mapping[str, float]) -> Metrics:
    """What reward functions gave to log_metric, under the names that they gave, as TRL logs it.

    Means over the samples (engines.rewards.runner.LoggedMetric). A name in `own_metrics`, those of
    the step itself, is put under log_metric/.
    """
    pool = pooled(shard.metrics for shard in scored)
    return {
        f"log_metric/{name}" if name in own_metrics else name: metric.mean
        for name, metric in pool.items()
    }
