"""The rollout task: one shard of a step's prompts becomes completions, on one rollout worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.futures import PrefectFuture

from storage.batches.refs import BatchRef
from tasks.results import Prompts, Sampled, SampledShards, Unsampled, WholeShards
from tasks.run.contract import StageView
from tasks.run.events import ShardSampled
from tasks.run.features import PromptShard
from tasks.run.run import Run
from tasks.run.shard_driver import ShardRange
from tasks.run.stage import OPTIONS
from tasks.sampling import SamplingStage, sample_or_leave


@task(name="rollout", task_run_name="rollout {shards}", **OPTIONS)
def rollout(run: Run, step: int, prompts: Prompts, shards: ShardRange) -> SampledShards:
    """Sample `group_size` completions for each prompt of some shards.

    A shard that was finished before, under the same prompts, weights and sampling parameters, is
    read from the store. An attempt goes to the rollout worker that is free first; the worker's
    engine is brought to the current weights first if it lags (a restarted worker). With `episodes`
    a completion has several turns, between which environments answer. A feature may have the samples
    of a shard without that, such as answers of the data.
    """
    stage = SamplingStage(name="rollout", sampling=run.sampling)

    def one(shard: int) -> Sampled | Unsampled:
        begun = prompts.carried.begun_of(shard - 1) if shard <= len(prompts.carried) else None
        before = prompts.shards_before
        rows = prompts.ref.part(shard - 1 - before, shards.of - before)
        found: Sampled | Unsampled | None = None
        if begun is None:
            own = PromptShard(step=step, number=shard, prompts=rows, n=stage.sampling.n)
            found = next(filter(None, (one.complete(run, own) for one in run.features)), None)
        if found is None:
            found = complete(run, step, rows, stage, shard, begun)
        tokens = found.stats.tokens if isinstance(found, Sampled) else 0
        run.tell(ShardSampled(step=step, tokens=tokens))
        run.shards.ended(step, shard)
        return found

    return tuple(run.shards.drive(step, "rollout", shards, one))


def complete(
    run: StageView,
    step: int,
    prompts: BatchRef,
    stage: SamplingStage,
    shard: int,
    begun: BatchRef | None = None,
) -> Sampled | Unsampled:
    """Complete the prompts of a shard (counted from 1), in one turn or in episodes.

    begun: samples, as an earlier step left them. Only shards that train are Unsampled.
    """
    if run.config.episodes is None:
        return sample_or_leave(run, step, prompts, stage, shard, begun)
    from tasks.episodes import play  # only a run with episodes needs them

    return play(run, step, prompts, stage, shard, begun)


def rollout_shards(
    run: Run, step: int, prompts: PrefectFuture[Prompts]
) -> Sequence[PrefectFuture[WholeShards] | WholeShards]:
    """Rollout tasks for the shards of a step's prompts; waits for those.

    A feature may give only some groups, and wait until it is known which.
    """

    def submit(shards: ShardRange) -> PrefectFuture[Any]:
        return rollout.submit(run, step, prompts, shards)  # type: ignore[call-overload]

    drawn = prompts.result()
    for feature in run.features:
        if (groups := feature.rollout(run, step, drawn, submit)) is not None:
            return groups
    count = shards_of(run, prompts)
    return [submit(shards) for shards in run.shards.ranges(count, drawn.shards_before)]


def shards_of(run: Run, prompts: PrefectFuture[Prompts]) -> int:
    """Into how many shards the prompts go; a last step may have fewer prompts than there are."""
    drawn = prompts.result()
    if run.config.over_samples or drawn.carried:
        return len(drawn.ref)
    return min(run.config.rollout.shards, len(drawn.ref))
