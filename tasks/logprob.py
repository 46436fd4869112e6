"""The logprob task: the samples under the policy before the update, and under the reference."""

from __future__ import annotations

from prefect import task

from configs.cluster import Role
from engines.train.contract import LogprobColumn
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from tasks.results import WholeShards, samples_of_shards
from tasks.run.roles import ACTOR, REF
from tasks.run.run import Run
from tasks.run.stage import OPTIONS, attempted


@task(name="logprob", task_run_name="logprob", **OPTIONS)
def logprob(run: Run, step: int, sampled: list[WholeShards] | BatchRef) -> BatchRef:
    """The samples with old_logprobs, sum_pi_squared, ref_logprobs, whichever the algorithm uses.

    It needs no rewards, so it runs beside them; or after them, where the flow hands over the samples
    that train, and those alone.
    """
    run.gate.check_turn(step)
    batch = sampled if isinstance(sampled, BatchRef) else samples_of_shards(sampled)
    samples = batch.of_policy(run.store)
    if not len(samples):
        return samples
    result = samples
    sources: list[tuple[LogprobColumn, Role, int, bool]] = []
    if run.needs_old:
        squared = run.algorithm.needs_squares
        sources.append(("old_logprobs", "actor", step - 1, squared))
    if run.config.algorithm.needs_reference and run.config.lora is not None:
        # Of the actor's base, whatever its version.
        sources.append(("ref_logprobs", "actor", step - 1, False))
    elif run.config.algorithm.needs_reference:
        sources.append(("ref_logprobs", "ref", 0, False))
    for column, role, version, squared in sources:
        trainer = run.engines[REF] if role == "ref" else run.engines[ACTOR]
        key = key_of(column, samples.to_json(), version, squared)
        out_key = run.files.stage_key(step, column, 1, key)
        with (
            attempted(run, step, "logprob") as attempt,
            run.engines.holding(attempt.assignment, role),
        ):
            columns = trainer.logprobs(version, samples, column, out_key, squared)
        result = result.with_columns(columns)
    return result
