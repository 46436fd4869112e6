"""The reward task: score one shard as soon as it is sampled, on a cpu worker."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger

from engines.data.results import SampleFailure
from storage.objects.digests import key_of
from tasks.results import Sampled, Scored
from tasks.run.retries import OPTIONS, attempted
from tasks.run.run import Run


@task(name="reward", task_run_name="reward {shard}/{shards}", **OPTIONS)
def reward(run: Run, step: int, sampled: Sampled, shard: int, shards: int) -> Scored:
    """Score the completions of a shard (counted from 1).

    An exception, a time-out or a crash in a reward function is not retried and is not a reward: the
    sample is marked failed, and the function's traceback goes to this task's log.
    """
    return scored(run, step, sampled, shard)


def reward_shards(
    run: Run, step: int, sampled: Sequence[PrefectFuture[Sampled]]
) -> list[PrefectFuture[Scored]]:
    """A reward task for each shard that is sampled."""
    return [
        reward.submit(run, step, shard, number, len(sampled))  # type: ignore[call-overload]
        for number, shard in enumerate(sampled, 1)
    ]


def scored(run: Run, step: int, sampled: Sampled, shard: int) -> Scored:
    """A shard with its rewards; failures are logged."""
    key = key_of("reward", sampled.ref.to_json(), run.config.rewards.model_dump(mode="json"))
    out_key = run.files.stage_key(step, "reward", shard, key)
    with attempted(run, step, "reward", shard) as attempt:
        result = run.engines.scorers.call(
            "score",
            run.call_id(step, f"score-{shard}-{key}"),
            attempt.assignment,
            prompts=sampled.prompts,
            samples=sampled.ref,
            out_key=out_key,
        )
    for (function, error), samples in by_cause(result.failures).items():
        numbers = ", ".join(map(str, samples))
        trace = result.tracebacks.get(error, "")
        text = f"Scoring failed in {function} for sample {numbers}: {error}\n{trace}"
        get_run_logger().error("%s", text.rstrip())
    return Scored(
        sampled=sampled,
        ref=sampled.ref.drop(["status"]).with_columns(result.ref),
        failures=result.failed,
        code=result.code,
        seconds=result.seconds,
    )


def by_cause(failures: Sequence[SampleFailure]) -> dict[tuple[str, str], list[int]]:
    """Sample numbers by function and error, so that one mistake is told once."""
    found: dict[tuple[str, str], list[int]] = {}
    for failure in failures:
        found.setdefault((failure.function, failure.error), []).append(failure.sample)
    return found
