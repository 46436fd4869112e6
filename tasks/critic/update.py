"""The critic_update task: one step's batch trains the critic, on all ranks of its gang."""

from __future__ import annotations

from prefect import task

from tasks.critic.role import CRITIC
from tasks.results import TrainBatch, Updated
from tasks.run.run import Run
from tasks.run.stage import OPTIONS, attempted
from tasks.update import planned


@task(name="critic_update", task_run_name="critic_update", **OPTIONS)
def critic_update(run: Run, step: int, batch: TrainBatch) -> Updated:
    """Move the critic towards the returns of the batch; it then holds version step.

    As with the policy, a gang that broke is brought back by snapshot and replay.
    """
    run.gate.check_turn(step)
    stage = "critic_update"
    with (
        planned(run, step, CRITIC, "critic", batch, stage) as plan,
        attempted(run, step, stage) as attempt,
        run.engines.holding(attempt.assignment, "critic"),
    ):
        result = run.engines[CRITIC].update(step, batch.ref, run.algorithm, plan)
    metrics = {name.replace("train/", "critic/"): value for name, value in result.metrics.items()}
    return Updated(version=step, metrics=metrics)
