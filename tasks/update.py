"""The update task: one step's batch trains the policy, on all ranks of the gang."""

from __future__ import annotations

from prefect import task

from tasks.results import TrainBatch, Updated
from tasks.run.retries import OPTIONS, attempted
from tasks.run.run import Run


@task(name="update", task_run_name="update", **OPTIONS)
def update(run: Run, step: int, batch: TrainBatch) -> Updated:
    """Apply the step's update to version step - 1.

    A gang that broke is formed anew and brought back to version step - 1 from a snapshot and the
    stored batches, so that a retry never applies an update twice.
    """
    run.gate.check_turn(step)
    with attempted(run, step, "update"):
        result = run.engines.actor.update(step, batch.ref, run.algorithm)
    return Updated(version=step, metrics=dict(result.metrics))


@task(name="critic_update", task_run_name="critic_update", **OPTIONS)
def critic_update(run: Run, step: int, batch: TrainBatch) -> Updated:
    """Move the critic towards the returns of the batch; it then holds version step.

    As with the policy, a gang that broke is brought back by snapshot and replay.
    """
    run.gate.check_turn(step)
    with attempted(run, step, "critic_update"):
        result = run.engines.critic.update(step, batch.ref, run.algorithm)
    metrics = {name.replace("train/", "critic/"): value for name, value in result.metrics.items()}
    return Updated(version=step, metrics=metrics)
