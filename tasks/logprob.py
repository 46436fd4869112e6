"""The logprob task: the samples under the policy before the update, and under the reference."""

from __future__ import annotations

from prefect import task

from storage.digests import key_of
from storage.refs import BatchRef
from tasks.results import Sampled
from tasks.retries import OPTIONS, attempted
from tasks.run import Run


@task(name="logprob", **OPTIONS)
def logprob(run: Run, step: int, sampled: list[Sampled]) -> BatchRef:
    """The samples with old_logprobs and ref_logprobs, whichever the algorithm uses.

    It needs no rewards, so it runs beside them.
    """
    samples = BatchRef.concat([shard.ref for shard in sampled])
    result = samples
    sources = []
    if run.needs_old:
        sources.append(("old_logprobs", run.engines.actor, step - 1))
    if run.needs_ref:
        sources.append(("ref_logprobs", run.engines.ref, 0))
    for column, trainer, version in sources:
        key = key_of(column, samples.to_json(), version)
        out_key = run.files.stage_key(step, column, 1, key)
        with attempted(run, step, "logprob"):
            result = result.with_columns(trainer.logprobs(version, samples, column, out_key))
    return result
