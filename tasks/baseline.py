"""The baseline task: the greedy completion of each prompt of a shard, sampled and scored (ReMax)."""

from __future__ import annotations

import dataclasses

from prefect import task
from prefect.futures import PrefectFuture

from tasks.results import Prompts, Scored
from tasks.reward import scored
from tasks.rollout import sample_shard, shards_of
from tasks.run.retries import OPTIONS
from tasks.run.run import Run


@task(name="baseline", task_run_name="baseline {shard}/{shards}", **OPTIONS)
def baseline(run: Run, step: int, prompts: Prompts, shard: int, shards: int) -> Scored:
    """Complete each prompt of a shard (counted from 1) greedily, and score that.

    The rewards are what the samples are compared with; these completions do not train. What the
    functions give to log_extra is in their batch; log_metric counts for the samples only.
    """
    part = prompts.ref.chunk(shards)[shard - 1]
    greedy = dataclasses.replace(run.sampling, n=1, temperature=1.0, top_p=1.0, top_k=1)
    # Numbered on from the samples' shards: a call of the same number would be the same call.
    sampled = sample_shard(run, step, part, greedy, "baseline", shards + shard)
    return scored(run, step, sampled, shards + shard)


def baseline_shards(
    run: Run, step: int, prompts: PrefectFuture[Prompts]
) -> list[PrefectFuture[Scored]]:
    """A baseline task for each shard of a step's prompts; waits for those."""
    shards = shards_of(run, prompts)
    return [
        baseline.submit(run, step, prompts, shard, shards)  # type: ignore[call-overload]
        for shard in range(1, shards + 1)
    ]
