"""The logprob task: log-probs of the samples under the policy before the update and the reference."""

from __future__ import annotations

from prefect import task

from engines.rollout import RolloutResult
from storage.digests import key_of
from storage.refs import BatchRef
from tasks.retries import OPTIONS, attempted
from tasks.run import Run


@task(name="logprob", **OPTIONS)
def logprob(run: Run, step: int, sampled: list[RolloutResult]) -> BatchRef:
    """Add old_logprobs and ref_logprobs, whichever the algorithm uses, as new columns.

    It needs no rewards, so it runs beside them.
    """
    samples = BatchRef.concat([shard.ref for shard in sampled])
    columns = samples
    for column, trainer in run.logprob_sources():
        key = key_of(column, samples.to_json(), run.rollouts.weights.digest)
        out_key = run.files.stage_key(step, column, 1, key)
        with attempted(run, step, column):
            columns = columns.with_columns(trainer.logprobs(step, samples, column, out_key))
    return columns
