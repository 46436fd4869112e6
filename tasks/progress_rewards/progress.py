"""Progress rewards: an embedding of each episode, as soon as its shard is sampled, then all compared.

Embeddings are made beside the rewards, on the encoder's own engines, and are finished in the store: a
flow that goes on asks for none again. What they come to is found in one call for the whole step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from prefect import task
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger

from engines.encoders.contract import EpisodeEncoder, ProgressResult, ProgressScorer
from engines.episodes.frames import FIRST
from engines.rewards.runner import LoggedMetric
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from tasks.progress_rewards.roles import ENCODER, PROGRESS, srpo
from tasks.results import Scored, WholeShards, frames_of, samples_of_shards
from tasks.reward import by_cause, samples_of
from tasks.run.run import Run
from tasks.run.stage import OPTIONS, Stage


@task(name="embedding", task_run_name="embedding {number}/{count}", **OPTIONS)
def embedding(run: Run, step: int, sampled: WholeShards, number: int, count: int) -> BatchRef:
    """Embeddings of the episodes of what one rollout task sampled [N] (tasks counted from 1).

    embedding, encoder, embedding_error. An encoder that dies is built anew and makes them again.
    """
    samples = samples_of_shards([sampled])[["sample_id", "status", FIRST]]
    frames = frames_of(sampled)
    given = [samples.to_json(), None if frames is None else frames.to_json()]
    key = key_of("embedding", srpo(run.config).encoder.model_dump(mode="json"), *given)
    stage = Stage(run=run, step=step, name="embedding", key=key, shard=number)
    return stage.batch(
        run.engines[ENCODER],
        EpisodeEncoder.embed,
        samples=samples,
        frames=frames,
        out_key=stage.out_key,
    )


def embedding_shards(
    run: Run, step: int, sampled: Sequence[PrefectFuture[WholeShards] | WholeShards]
) -> list[PrefectFuture[BatchRef]]:
    """An embedding task for what each rollout task sampled; it needs no rewards."""
    return [
        embedding.submit(run, step, shards, number, len(sampled))  # type: ignore[arg-type]
        for number, shards in enumerate(sampled, 1)
    ]


@task(name="progress", task_run_name="progress", **OPTIONS)
def progress(run: Run, step: int, scored: list[Scored], embedded: list[BatchRef]) -> list[Scored]:
    """The scored shards with rewards for progress in the place of theirs, which stay as scores.

    Episodes are compared over the whole step. One without an embedding is failed, and has no reward.
    """
    samples = samples_of(run, step, scored).with_columns(BatchRef.concat(embedded))
    prompts = BatchRef.concat([shard.prompts for one in scored for shard in one.sampled])
    wanted = srpo(run.config).progress
    key = key_of("progress", samples.to_json(), wanted.model_dump(mode="json"))
    stage = Stage(run=run, step=step, name="progress", key=key)
    result = stage.call(
        run.engines[PROGRESS],
        ProgressScorer.progress,
        prompts=prompts[["group_id", "row"]],
        samples=samples,
        settings=wanted,
        out_key=stage.out_key,
    )
    for (_, error), failed in by_cause(result.failures).items():
        numbers = ", ".join(map(str, failed))
        get_run_logger().error("No embedding of episode %s: %s", numbers, error)
    return shards_with(scored, samples.with_columns(result.ref), result)


def shards_with(scored: list[Scored], samples: BatchRef, result: ProgressResult) -> list[Scored]:
    """The shards with their rows of all samples; what is of the whole step goes with the first."""
    metrics = {name: LoggedMetric.over([value]) for name, value in result.metrics.items()}
    found, start = [], 0
    for one in scored:
        stop = start + len(one.ref)
        first = start == 0
        found.append(
            dataclasses.replace(
                one,
                ref=samples.rows(start, stop),
                failures=one.failures + (len(result.failures) if first else 0),
                metrics={**one.metrics, **metrics} if first else one.metrics,
                clusters=result.clusters,
            )
        )
        start = stop
    return found
