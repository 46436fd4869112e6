"""The rollout task: one shard of a step's prompts becomes completions, on one rollout worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.futures import PrefectFuture

from engines.rollout.contract import RolloutRequest, Sampling, ShardStats
from engines.rollout.partial import PartialSamples
from storage.batches.refs import BatchRef
from storage.objects.digests import key_of
from storage.runs.commit_log import version_weights
from storage.runs.weights import WeightsRef
from tasks.over_sampling import finished_groups
from tasks.results import Prompts, Sampled, SampledShards, Unsampled, WholeShards
from tasks.run.retries import OPTIONS, attempted
from tasks.run.run import Run
from tasks.run.shard_driver import ShardRange


@task(name="rollout", task_run_name="rollout {shards}", **OPTIONS)
def rollout(run: Run, step: int, prompts: Prompts, shards: ShardRange) -> SampledShards:
    """Sample `group_size` completions for each prompt of some shards.

    A shard that was finished before, under the same prompts, weights and sampling parameters, is
    read from the store. An attempt goes to the rollout worker that is free first; the worker's
    engine is brought to the current weights first if it lags (a restarted worker).
    """

    def one(shard: int) -> Sampled | Unsampled:
        begun = prompts.carried.begun_of(shard - 1) if shard <= len(prompts.carried) else None
        rows = prompts.ref.part(shard - 1, shards.of)
        found = sample_or_leave(run, step, rows, run.sampling, "rollout", shard, begun)
        run.progress.shard_done(found.stats.tokens if isinstance(found, Sampled) else 0)
        run.shards.ended(step, shard)
        return found

    return tuple(run.shards.drive(step, "rollout", shards, one))


def rollout_shards(
    run: Run, step: int, prompts: PrefectFuture[Prompts]
) -> Sequence[PrefectFuture[WholeShards] | WholeShards]:
    """Rollout tasks for the shards of a step's prompts; waits for those.

    With rollout.over_sampling, waits for the groups that the step trains on, and gives only those.
    """

    def submit(shards: ShardRange) -> PrefectFuture[Any]:
        return rollout.submit(run, step, prompts, shards)  # type: ignore[call-overload]

    drawn, count = prompts.result(), shards_of(run, prompts)
    if run.config.over_samples or drawn.carried:
        return finished_groups(run, step, drawn, submit)
    return [submit(shards) for shards in run.shards.ranges(count)]


def shards_of(run: Run, prompts: PrefectFuture[Prompts]) -> int:
    """Into how many shards the prompts go; a last step may have fewer prompts than there are."""
    drawn = prompts.result()
    if run.config.over_samples or drawn.carried:
        return len(drawn.ref)
    return min(run.config.rollout.shards, len(drawn.ref))


def sample_shard(
    run: Run, step: int, prompts: BatchRef, sampling: Sampling, stage: str, shard: int
) -> Sampled:
    """Complete the prompts of a shard, or find that done."""
    found = sample_or_leave(run, step, prompts, sampling, stage, shard)
    assert isinstance(found, Sampled), "only shards of the stage rollout are left"
    return found


def sample_or_leave(
    run: Run,
    step: int,
    prompts: BatchRef,
    sampling: Sampling,
    stage: str,
    shard: int,
    begun: BatchRef | None = None,
) -> Sampled | Unsampled:
    """Complete the prompts of a shard, or find that done; `begun`: samples to go on with."""
    usable = usable_weights(run, step)
    given = [] if begun is None else [begun.to_json()]
    keys = [
        run.files.stage_key(
            step,
            stage,
            shard,
            key_of("rollout", prompts.to_json(), one.digest, asdict(sampling), *given),
        )
        for one in usable
    ]
    for weights, key in zip(usable, keys, strict=True):
        if (done := run.files.finished(key)) is not None:
            return sampled(prompts, weights, done)
    weights, out_key = usable[0], keys[0]
    with attempted(run, step, stage, shard) as attempt:
        request = RolloutRequest(
            prompts=prompts,
            sampling=sampling,
            out_key=out_key,
            step=step,
            shard=shard,
            attempt=attempt.number,
            begun=begun,
            save_every=run.config.saves_tokens_every if stage == "rollout" else None,
            may_be_cut=stage == "rollout",
        )
        result = run.engines.rollouts.generate(request, attempt.assignment)
    if result is None:  # the step did not wait for it
        partial = PartialSamples(run.store, out_key).take()
        return Unsampled(begun=partial or begun)
    record = {"ref": result.ref.to_json(), "stats": asdict(result.stats)}
    if (stands := run.files.finish(out_key, record)) != record:
        return sampled(prompts, weights, stands)
    return Sampled(prompts=prompts, weights=weights, ref=result.ref, stats=result.stats)


def usable_weights(run: Run, step: int) -> list[WeightsRef]:
    """The policy versions with which a step may be sampled, the current one first.

    The others are those that max_staleness allows: a flow that died may have finished shards under
    them.
    """
    pool = run.engines.rollouts
    current = pool.weights
    return [current] + [
        pool.synced.get(version) or version_weights(run.files, version)
        for version in range(current.version - 1, run.oldest_version(step) - 1, -1)
    ]


def sampled(prompts: BatchRef, weights: WeightsRef, record: Mapping[str, Any]) -> Sampled:
    """A finished shard from its record: of two attempts, the one that finished first."""
    stats = ShardStats(**record["stats"])
    ref = BatchRef.from_json(record["ref"])
    return Sampled(prompts=prompts, weights=weights, ref=ref, stats=stats)
