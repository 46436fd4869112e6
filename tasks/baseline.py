"""The baseline task: the greedy completion of each prompt, sampled and scored (ReMax).

With `episodes` a completion is an episode in which the likeliest token is always taken.
"""

from __future__ import annotations

from prefect import task
from prefect.futures import PrefectFuture

from tasks.results import Prompts, Sampled, Scored
from tasks.reward import scored
from tasks.rollout import complete, shards_of
from tasks.run.run import Run
from tasks.run.shard_driver import ShardRange
from tasks.run.stage import OPTIONS
from tasks.sampling import SamplingStage


@task(name="baseline", task_run_name="baseline {shards}", **OPTIONS)
def baseline(run: Run, step: int, prompts: Prompts, shards: ShardRange) -> Scored:
    """Complete each prompt of some shards greedily, and score that.

    The rewards are what the samples are compared with; these completions do not train. What the
    functions give to log_extra is in their batch; log_metric counts for the samples only.
    """
    stage = SamplingStage(name="baseline", sampling=run.sampling.as_greedy)

    def one(shard: int) -> Sampled:
        rows = prompts.ref.part(shard - 1, shards.of)
        # Numbered on from the samples' shards: a call of the same number would be the same call.
        shard_samples = complete(run, step, rows, stage, shards.of + shard)
        assert isinstance(shard_samples, Sampled), "only shards that train are left"
        return shard_samples

    sampled = tuple(run.shards.drive(step, "baseline", shards, one))
    return scored(run, step, sampled, shards.of + shards.first)


def baseline_shards(
    run: Run, step: int, prompts: PrefectFuture[Prompts]
) -> list[PrefectFuture[Scored]]:
    """Baseline tasks for the shards of a step's prompts; waits for those."""
    count = shards_of(run, prompts)
    return [
        baseline.submit(run, step, prompts, shards)  # type: ignore[call-overload]
        for shards in run.shards.ranges(count)
    ]
