"""The update task: one step's batch trains the policy, on all ranks of the gang."""

from __future__ import annotations

from prefect import task

from tasks.results import TrainBatch, Updated
from tasks.retries import OPTIONS, attempted
from tasks.run import Run


@task(name="update", task_run_name="update", **OPTIONS)
def update(run: Run, step: int, batch: TrainBatch) -> Updated:
    """Apply the step's update to version step - 1.

    A gang that broke is formed anew and brought back to version step - 1 from a snapshot and the
    stored batches, so that a retry never applies an update twice.
    """
    with attempted(run, step, "update"):
        result = run.engines.actor.update(step, batch.ref, run.algorithm)
    return Updated(version=step, metrics=dict(result.metrics))
