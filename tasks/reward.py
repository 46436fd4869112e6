"""The reward task: score one shard as soon as it is sampled, on a cpu worker."""

from __future__ import annotations

from prefect import task
from prefect.logging import get_run_logger

from storage.digests import key_of
from tasks.results import Sampled, Scored
from tasks.retries import OPTIONS, attempted
from tasks.run import Run


@task(name="reward", task_run_name="reward {shard}/{shards}", **OPTIONS)
def reward(run: Run, step: int, sampled: Sampled, shard: int, shards: int) -> Scored:
    """Score the completions of a shard (counted from 1).

    An exception, a time-out or a crash in a reward function is not retried and is not a reward: the
    sample is marked failed, and the function's traceback goes to this task's log.
    """
    key = key_of("reward", sampled.ref.to_json(), run.config.rewards.model_dump(mode="json"))
    out_key = run.files.stage_key(step, "reward", shard, key)
    with attempted(run, step, "reward", shard) as attempt:
        result = run.engines.scorers.call(
            "score",
            run.lease(step, f"score-{shard}-{key}"),
            attempt.assignment,
            prompts=sampled.prompts,
            samples=sampled.ref,
            out_key=out_key,
        )
    for failure in result.failures:
        get_run_logger().error(
            "Sample %d failed in %s: %s", failure.sample, failure.function, failure.error
        )
    return Scored(
        sampled=sampled,
        ref=sampled.ref.drop(["status"]).with_columns(result.ref),
        failures=result.failed,
        code=result.code,
        seconds=result.seconds,
    )
