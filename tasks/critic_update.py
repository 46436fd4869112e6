"""The critic_update task: one step's batch trains the critic, on all ranks of its gang."""

from __future__ import annotations

from prefect import task

from tasks.results import TrainBatch, Updated
from tasks.retries import OPTIONS, attempted
from tasks.run import Run


@task(name="critic_update", task_run_name="critic_update", **OPTIONS)
def critic_update(run: Run, step: int, batch: TrainBatch) -> Updated:
    """Move the critic towards the returns of the batch; it then holds version step.

    As with the policy, a gang that broke is brought back by snapshot and replay.
    """
    with attempted(run, step, "critic_update"):
        result = run.engines.critic.update(step, batch.ref, run.algorithm)
    metrics = {name.replace("train/", "critic/"): value for name, value in result.metrics.items()}
    return Updated(version=step, metrics=metrics)
