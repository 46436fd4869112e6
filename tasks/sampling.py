"""A shard of prompts becomes completions on one rollout engine, or is found done in the store."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from configs.data import Source
from engines.rollout.contract import RolloutRequest, RolloutResult, Sampling, ShardStats
from engines.rollout.partial import PartialSamples
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from storage.runs.weights import WeightsRef
from tasks.results import Sampled, Unsampled
from tasks.run.contract import StageView
from tasks.run.roles import OPPONENT, ROLLOUT
from tasks.run.stage import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingStage:
    """What shards are sampled for, and how."""

    name: str  # rollout, baseline or evaluate
    sampling: Sampling
    source: Source | None = None  # of the prompts' rows, where it is not data.source

    @property
    def trains(self) -> bool:
        """Whether the samples are those that the step trains on."""
        return self.name == "rollout"


def sample_or_leave(
    run: StageView,
    step: int,
    prompts: BatchRef,
    stage: SamplingStage,
    shard: int,
    begun: BatchRef | None = None,
    rather: str = "",
) -> Sampled | Unsampled:
    """Complete the prompts of a shard, or find that done.

    begun: samples to go on with. rather: name of the worker whose engine has computed them. Only
    shards that train are left, for a step that does not wait for them.
    """
    sampling, usable = stage.sampling, run.usable_weights(step)
    given = [] if begun is None else [begun.to_json()]
    pieces = []
    for weights in usable:
        key = key_of("rollout", prompts.to_json(), weights.digest, sampling.identity, *given)
        pieces.append(Stage(run=run, step=step, name=stage.name, key=key, shard=shard))
        if (done := pieces[-1].finished()) is not None:
            return sampled(prompts, weights, RolloutResult.of_record(done), pieces[-1].out_key)
    weights, piece = usable[0], pieces[0]
    run.files.expect(piece.out_key)  # a worker may be lost when it has marked it: then it is there
    with piece.attempted() as attempt:
        attempt.assignment.worker = rather
        request = RolloutRequest(
            prompts=prompts,
            sampling=sampling,
            out_key=piece.out_key,
            step=step,
            shard=shard,
            attempt=attempt.number,
            begun=begun,
            save_every=run.config.saves_tokens_every if stage.trains else None,
            may_be_cut=stage.trains,
            marked=True,
        )
        result = run.engines[ROLLOUT].generate(request, attempt.assignment)
    if result is None:  # the step did not wait for it
        partial = PartialSamples(run.store, piece.out_key).take()
        return Unsampled(begun=partial or begun)
    run.episodes.told(result.stats.cache_use)
    return sampled(prompts, weights, result, piece.out_key)


def opponents_turn(
    run: StageView,
    step: int,
    prompts: BatchRef,
    stage: SamplingStage,
    shard: int,
    begun: BatchRef,
    rather: str = "",
) -> Sampled:
    """The next turns of the frozen players of a shard, by their own engines, or find them done.

    begun: all samples of the shard; the policy's are left as they are. rather: as in
    `sample_or_leave`. A step that does not wait for its shards waits for these turns.
    """
    pool = run.engines[OPPONENT]
    weights, identity = pool.weights, stage.sampling.identity
    key = key_of("opponent", prompts.to_json(), weights.digest, identity, begun.to_json())
    piece = Stage(run=run, step=step, name="opponent", key=key, shard=shard)
    if (done := piece.finished()) is not None:
        return sampled(prompts, weights, RolloutResult.of_record(done), piece.out_key)
    run.files.expect(piece.out_key)
    with piece.attempted() as attempt:
        attempt.assignment.worker = rather
        request = RolloutRequest(
            prompts=prompts,
            sampling=stage.sampling,
            out_key=piece.out_key,
            step=step,
            shard=shard,
            attempt=attempt.number,
            begun=begun,
            marked=True,
            frozen=True,
        )
        result = pool.generate(request, attempt.assignment)
        assert result is not None, "the opponent's turns are not cut"
    return sampled(prompts, weights, result, piece.out_key)


def sampled(prompts: BatchRef, weights: WeightsRef, found: RolloutResult, key: str = "") -> Sampled:
    """A finished shard: of two attempts, the one that finished first."""
    return Sampled(prompts=prompts, weights=weights, ref=found.ref, stats=found.stats, key=key)


def together(before: ShardStats | None, turn: ShardStats) -> ShardStats:
    """What a shard's turns cost, up to one of them."""
    if before is None:
        return turn
    known = [version for version in (before.oldest, turn.oldest) if version is not None]
    uses = (before.cache_use, turn.cache_use)
    return dataclasses.replace(
        turn,
        tokens=before.tokens + turn.tokens,
        seconds=before.seconds + turn.seconds,
        oldest=min(known, default=None),
        read=before.read + turn.read,
        cached=before.cached + turn.cached,
        cache_use=max((use for use in uses if use is not None), default=None),
    )
