"""The off-policy part of a distillation: shards whose samples are answers of the data (GKD)."""

from __future__ import annotations

import numpy as np

from configs.distill import DistillConfig, OffPolicyConfig
from engines.data.contract import Scorer
from engines.rollout.contract import RolloutResult, ShardStats
from storage.objects.documents import key_of
from tasks.results import Sampled
from tasks.run.contract import StageView
from tasks.run.features import PromptShard
from tasks.run.roles import SCORER
from tasks.run.stage import Stage
from tasks.sampling import sampled
from tasks.teachers.models import distillation


def given_answers(run: StageView, shard: PromptShard) -> Sampled | None:
    """The samples of a shard that are the data's answers; None where the student samples them."""
    mixture = off_policy(distillation(run.config), shard.step, shard.number)
    return None if mixture is None else given_shard(run, shard, mixture.column)


def off_policy(config: DistillConfig, step: int, shard: int) -> OffPolicyConfig | None:
    """What gives a shard's samples (counted from 1) where it is not the student; None where it is.

    One draw for each shard of a step, the same whenever it is asked for.
    """
    mixture = config.off_policy
    if mixture is None:
        return None
    draw = np.random.default_rng([config.seed, step, shard]).random()
    return mixture if draw >= mixture.student_data_fraction else None


def given_shard(run: StageView, shard: PromptShard, column: str) -> Sampled:
    """The samples that the rows of a shard's prompts have, or find them in the store."""
    prompts, n, weights = shard.prompts, shard.n, run.usable_weights(shard.step)[0]
    key = key_of("given", prompts.to_json(), column, n, run.config.rollout.max_new_tokens)
    piece = Stage(run=run, step=shard.step, name="given", key=key, shard=shard.number)
    if (done := piece.finished()) is not None:
        return sampled(prompts, weights, RolloutResult.of_record(done), piece.out_key)
    with piece.attempted() as attempt:
        found = piece.ask(
            attempt,
            run.engines[SCORER],
            Scorer.given,
            prompts=prompts,
            column=column,
            n=n,
            out_key=piece.out_key,
            attempt=attempt.number,
        )
    stats = ShardStats(
        rows=len(found.ref),
        prompt_tokens=found.prompt_tokens,
        tokens=0,  # none was drawn
        truncated=found.truncated,
        seconds=0.0,
        worker=attempt.assignment.worker,
        attempt=attempt.number,
        version=weights.version,
        digest=weights.digest,
    )
    done = piece.finish(RolloutResult(ref=found.ref, stats=stats).record())
    return sampled(prompts, weights, RolloutResult.of_record(done), piece.out_key)
