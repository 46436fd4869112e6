"""The teacher task: a teacher's log-probs of the student's tokens, as soon as they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from prefect import task
from prefect.futures import PrefectFuture

from configs.cluster import Role
from configs.distill import DistillConfig
from engines.teachers.client import TeacherClient
from storage.batches.forest import LENGTHS, PARENTS
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import key_of
from tasks.results import WholeShards, samples_of_shards
from tasks.run.run import Run
from tasks.run.stage import OPTIONS, Stage
from tasks.teachers.checks import teacher_of
from tasks.teachers.models import distillation
from tasks.teachers.roles import teacher_of_name


@task(name="teacher", task_run_name="teacher {number}/{count}", **OPTIONS)
def teacher(run: Run, step: int, sampled: WholeShards, number: int, count: int) -> BatchRef:
    """The teachers' columns of what one rollout task sampled [N] (tasks counted from 1).

    teacher, teacher_digest and teacher_logprobs; where words are compared, the likeliest ones too. A
    teacher that dies is built anew, and scores the same tokens again.
    """
    config = distillation(run.config)
    samples = samples_of_shards([sampled])
    named = names_of(run, config, sampled)
    parts, rows = [], []
    for name in dict.fromkeys(named):
        own = np.flatnonzero([one == name for one in named])
        parts.append(scored(run, step, name, samples.take(own), number, config))
        rows.append(own)
    # Each teacher's rows lie together; back to the order of the samples.
    return BatchRef.concat(parts).take(np.argsort(np.concatenate(rows)))


def teacher_shards(
    run: Run, step: int, sampled: Sequence[PrefectFuture[WholeShards] | WholeShards]
) -> list[PrefectFuture[BatchRef]]:
    """A teacher task for what each rollout task sampled; it needs no rewards and runs beside them."""
    return [
        teacher.submit(run, step, shards, number, len(sampled))  # type: ignore[arg-type]
        for number, shards in enumerate(sampled, 1)
    ]


def scored(
    run: Run, step: int, name: str, samples: BatchRef, number: int, config: DistillConfig
) -> BatchRef:
    """The columns of one teacher, of samples that are its own [n]."""
    trainer, top_k = teacher_of_name(run.engines, name), config.algorithm.distillation.top_k
    tokens = samples[[one for one in READ if one in samples.names]]
    key = key_of("teacher", name, top_k, tokens.to_json())
    served = isinstance(trainer, TeacherClient)  # on the devices of another process
    roles: tuple[Role, ...] = () if served else ("teacher",)
    stage = Stage(run=run, step=step, name="teacher", key=key, shard=number, part=name)
    with stage.attempted() as attempt, run.engines.holding(attempt.assignment, *roles):
        digest = trainer.digest(0, config.rollout.dtype)
        stage = replace(stage, key=f"{key}-{digest}")
        made = trainer.teach(tokens, stage.out_key, top_k)
    origin = replace(stage, part=f"{name}-origin")
    columns = {"teacher": [name] * len(samples), "teacher_digest": [digest] * len(samples)}
    return made.with_columns(write_batch(run.store, origin.out_key, columns))


# By a teacher.
READ = ("prompt_ids", "response_ids", "response_mask", "group_id", "player", LENGTHS, PARENTS)


def names_of(run: Run, config: DistillConfig, sampled: WholeShards) -> list[str]:
    """The teacher of each sample [N], by the rows of their prompts. Raises ValueError for none."""
    column, count = config.teacher_column, sum(len(shard.ref) for shard in sampled)
    if column is None:
        return [next(iter(config.teachers))] * count
    found = []
    for shard in sampled:
        rows = cast("list[dict[str, object]]", shard.prompts.fetch_list(run.store, "row"))
        each = len(shard.ref) // len(shard.prompts)
        for row in rows:
            found += [teacher_of(row, column, config.teachers, "A row")] * each
    return found
