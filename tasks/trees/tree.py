"""Tree rollouts: the completions of a prompt grow together, segment by segment.

A level of a shard's trees is sampled as any shard is, on the rollout engine that is free, from the
tokens that its paths have; then a data worker says which paths go on (engines/trees/tree_engine.py).
Each level, and what came of it, is finished in the store: a dead engine costs a segment, and a flow
that goes on after a crash begins with the level that was not finished.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.futures import PrefectFuture

from configs.tree import TreeConfig
from engines.rollout.contract import RolloutResult, Sampling, ShardStats
from engines.trees.contract import GrownTrees, Growth, TreeGrower
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from storage.runs.weights import WeightsRef
from tasks.results import Prompts, Sampled, WholeShards
from tasks.rollout import shards_of
from tasks.run.events import ShardSampled
from tasks.run.run import Run
from tasks.run.shard_driver import ShardRange
from tasks.run.stage import OPTIONS, Stage
from tasks.sampling import SamplingStage, sample_or_leave, together
from tasks.sampling import sampled as sampled_of
from tasks.trees.roles import TREES


@task(name="tree", task_run_name="tree {shards}", **OPTIONS)
def tree(run: Run, step: int, prompts: Prompts, shards: ShardRange) -> WholeShards:
    """Grow a tree with `group_size` leaves for each prompt of some shards.

    Trees that were finished before, under the same prompts, weights and settings, are read from the
    store.
    """

    def one(shard: int) -> Sampled:
        found = trees(run, step, prompts.ref.part(shard - 1, shards.of), shard)
        run.tell(ShardSampled(step=step, tokens=found.stats.tokens))
        run.shards.ended(step, shard)
        return found

    return tuple(run.shards.drive(step, "tree", shards, one))


def tree_shards(
    run: Run, step: int, prompts: PrefectFuture[Prompts]
) -> Sequence[PrefectFuture[WholeShards]]:
    """Tree tasks for the shards of a step's prompts."""
    ranges = run.shards.ranges(shards_of(run, prompts))
    return [tree.submit(run, step, prompts, shards) for shards in ranges]  # type: ignore[call-overload]


def trees(run: Run, step: int, prompts: BatchRef, shard: int) -> Sampled:
    """The trees of a shard's prompts, or find them grown."""
    config = settings(run)
    stage = SamplingStage(name="rollout", sampling=sampling_of(config))
    drawn = asdict(stage.sampling)
    for name in ("routed_experts", "min_p", "sampling_mask", "thinking_budget", "thinking_words"):
        if not drawn[name]:  # as older runs have it
            del drawn[name]
    key = key_of("trees", prompts.to_json(), drawn, *growing(config))
    whole = Stage(run=run, step=step, name="tree", key=key, shard=shard)
    digests = {one.digest: one for one in run.usable_weights(step)}
    done = whole.finished()
    if done is not None and str(done["weights"]) in digests:
        return of_record(prompts, digests[str(done["weights"])], done)
    level: Sampled | None = None
    stats: ShardStats | None = None
    found, planned = plan(run, step, prompts, stage, shard)
    used = {planned: found}  # what the levels left in the store, by the keys of their records
    levels: dict[str, BatchRef] = {}
    while found.asked is not None:
        rather = "" if level is None else level.stats.worker  # it has the paths' keys and values
        asked = found.asked
        sampled = sample_or_leave(run, step, asked, stage, shard, begun=asked, rather=rather)
        assert isinstance(sampled, Sampled), "a step waits for its trees"
        level = sampled
        levels[level.key] = level.ref
        stats = level.stats if stats is None else together(stats, level.stats)
        found, planned = plan(run, step, prompts, stage, shard, found, level)
        used[planned] = found
    assert level is not None and stats is not None
    assert found.samples is not None and found.nodes is not None
    rows = {"rows": len(found.samples), "truncated": found.truncated}
    record: dict[str, object] = {
        "ref": found.samples.to_json(),
        "nodes": found.nodes.to_json(),
        "stats": asdict(stats) | rows,
        "weights": level.weights.digest,
    }
    record = whole.finish(record)
    kept = found.samples.objects | found.nodes.objects | prompts.objects
    passed: list[tuple[str, BatchRef | None]] = [*levels.items()]
    passed += [(key, one.asked) for key, one in used.items()]
    run.files.discard({k: frozenset() if ref is None else ref.objects - kept for k, ref in passed})
    return of_record(prompts, level.weights, record)


def plan(
    run: Run,
    step: int,
    prompts: BatchRef,
    stage: SamplingStage,
    shard: int,
    before: GrownTrees | None = None,
    level: Sampled | None = None,
) -> tuple[GrownTrees, str]:
    """What a level came to and what is sampled next, with the key that it is stored under.

    before: what was asked for, which `level` has sampled.
    """
    config = settings(run)
    given = [] if level is None else [level.ref.to_json()]
    nodes = None if before is None or before.nodes is None else before.nodes.to_json()
    key = key_of("grow", prompts.to_json(), nodes, growing(config), *given)
    piece = Stage(run=run, step=step, name="grow", key=key, shard=shard)
    if (done := piece.finished()) is not None:
        return trees_of(done), piece.out_key
    found = piece.call(
        run.engines[TREES],
        TreeGrower.grow,
        prompts=prompts,
        growth=Growth(tree=config.tree, n=config.group_size, seed=config.rollout.seed, step=step),
        out_key=piece.out_key,
        before=before,
        level=None if level is None else level.ref,
    )
    refs = {"nodes": found.nodes, "asked": found.asked, "samples": found.samples}
    record = {name: None if ref is None else ref.to_json() for name, ref in refs.items()}
    done = piece.finish({**record, "truncated": found.truncated})
    return trees_of(done), piece.out_key


def trees_of(record: Mapping[str, Any]) -> GrownTrees:
    """What `plan` has put into the store of two attempts: the one that finished first."""
    refs = {
        name: None if record[name] is None else BatchRef.from_json(record[name])
        for name in ("nodes", "asked", "samples")
    }
    return GrownTrees(**refs, truncated=record["truncated"])


def of_record(prompts: BatchRef, weights: WeightsRef, record: Mapping[str, Any]) -> Sampled:
    """A finished shard from its record."""
    found = sampled_of(prompts, weights, RolloutResult.of_record(record))
    return dataclasses.replace(found, nodes=BatchRef.from_json(record["nodes"]))


def settings(run: Run) -> TreeConfig:
    """The settings of a run that samples trees."""
    assert isinstance(run.config, TreeConfig), "the run samples no trees"
    return run.config


def growing(config: TreeConfig) -> list[Any]:
    """What a tree grows by, beside its prompt, its policy and the sampling."""
    return [config.tree.model_dump(mode="json"), config.group_size, config.rollout.seed]


def sampling_of(config: TreeConfig) -> Sampling:
    """How a segment is drawn: one, for each row that is asked for."""
    return dataclasses.replace(
        Sampling.of(config.rollout, 1),
        segment_tokens=config.segment_tokens,
        segments=config.tree.depth,
        routed_experts=config.train.router_replay,
    )
