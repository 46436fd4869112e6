"""The values task: what the critic expects at every response token, before it is updated."""

from __future__ import annotations

from prefect import task

from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from tasks.critic.role import CRITIC
from tasks.results import WholeShards, samples_of_shards
from tasks.run.run import Run
from tasks.run.stage import OPTIONS, Stage


@task(name="values", task_run_name="values", **OPTIONS)
def values(run: Run, step: int, sampled: list[WholeShards]) -> BatchRef:
    """The samples with values, by the critic after step - 1 updates.

    It needs no rewards, so it runs beside them.
    """
    run.gate.check_turn(step)
    samples = samples_of_shards(sampled).of_policy(run.store)
    key = key_of("values", samples.to_json(), step - 1)
    stage = Stage(run=run, step=step, name="values", key=key)
    with stage.attempted() as attempt, run.engines.holding(attempt.assignment, "critic"):
        made = run.engines[CRITIC].values(step - 1, samples, stage.out_key)
    return samples.with_columns(made)
