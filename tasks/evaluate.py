"""The held-out evaluation: the last policy version on rows that no step trains on.

The rollout engines sample and the reward functions score, as in a step; nothing is trained.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from prefect import task

from configs.retraining import EvaluationConfig
from engines.rewards.failing_samples import LoggedMetric, pooled
from engines.rollout.contract import Sampling
from storage.batches.columns import TOKENS, SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.digests import key_of
from storage.prompts.datasets import open_source
from tasks.episodes import complete
from tasks.results import Prompts, Sampled
from tasks.reward import score
from tasks.run.flow_options import result_of
from tasks.run.retries import OPTIONS, attempted
from tasks.run.run import Run
from tasks.run.shard_driver import ShardRange
from tasks.sampling import SamplingStage

HOW_FAST = {"processes", "at_once", "python", "memory_gib"}  # episodes.…
ORDER = {
    "source",
    "order",
    "quarantine",
    "seed",
    "epochs",
    "last_step",
}  # data.…: which rows, in what order


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How a policy version did on the held-out rows."""

    version: int
    reward: float  # mean over the samples that could be scored
    error: float  # standard error of that mean
    samples: int
    failed: int  # samples that could not be scored; they are not in the mean
    truncated: int
    on: str  # digest of rows and manner: only evaluations with the same one can be compared


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedShard:
    """A shard of the held-out prompts, sampled and scored."""

    ref: BatchRef  # the samples with their rewards
    metrics: dict[str, LoggedMetric]  # what the reward functions gave to log_metric


def evaluate(run: Run) -> Evaluation:
    """Test the policy version that the rollout engines hold."""
    assert run.config.evaluation is not None
    count = min(run.config.rollout.shards, run.config.evaluation.rows)
    prompts = held_out.submit(run, run.config.evaluation)
    evaluated = [
        evaluate_shards.submit(run, prompts, shards)  # type: ignore[call-overload]
        for shards in run.shards.ranges(count)
    ]
    summed = summarize.submit(run, run.config.evaluation, evaluated)
    return result_of(summed)


@task(name="held-out prompts", task_run_name="held-out prompts", **OPTIONS)
def held_out(run: Run, evaluation: EvaluationConfig) -> Prompts:
    """The first rows of the evaluation's source, as prompts."""
    source = open_source(evaluation.source)
    rows = list(range(min(evaluation.rows, len(source))))
    asked = run.config.data.model_dump(mode="json", exclude={"last_step"})
    asked["source"] = evaluation.source.model_dump()
    key = key_of("held-out", TOKENS, source.digest, rows, asked)
    with attempted(run, run.after, "held-out") as attempt:
        made = run.engines.prompters.call(
            "prompts",
            run.call_id(run.after, f"held-out-{key}"),
            attempt.assignment,
            rows=rows,
            first_group=0,
            out_key=run.files.stage_key(run.head, "held-out", 1, key),
            source=evaluation.source,
        )
    if made.ref is None:
        raise ValueError(
            f"The first {len(rows)} rows of evaluation.source give no prompt that fits "
            f"data.max_prompt_tokens = {run.config.data.max_prompt_tokens}. Set it higher."
        )
    dropped: dict[str, list[int]] = {}
    for row, reason in made.dropped:
        dropped.setdefault(reason, []).append(row)
    return Prompts(ref=made.ref, cursor=run.cursor, drawn=len(rows), dropped=dropped)


@task(name="evaluate", task_run_name="evaluate {shards}", **OPTIONS)
def evaluate_shards(run: Run, prompts: Prompts, shards: ShardRange) -> list[EvaluatedShard]:
    """Sample and score some shards of the held-out prompts."""
    return run.shards.drive(
        run.after,
        "evaluate",
        shards,
        lambda shard: evaluated_shard(run, prompts.ref.part(shard - 1, shards.of), shard),
    )


def evaluated_shard(run: Run, part: BatchRef, shard: int) -> EvaluatedShard:
    """Sample and score a shard of the held-out prompts (counted from 1)."""
    assert run.config.evaluation is not None
    stage = SamplingStage(
        name="evaluate",
        sampling=sampling_of(run, run.config.evaluation),
        source=run.config.evaluation.source,
        one_version=True,
        kept_with=run.head,
    )
    sampled = complete(run, run.after, part, stage, shard)
    assert isinstance(sampled, Sampled), "only shards that train are left"
    key = key_of("evaluated", sampled.ref.to_json())
    ref, result = score(
        run, run.after, "evaluated", shard, part, sampled.ref, key, kept_with=run.head
    )
    return EvaluatedShard(ref=ref, metrics=result.metrics)


@task(name="evaluation", task_run_name="evaluation", **OPTIONS)
def summarize(
    run: Run, evaluation: EvaluationConfig, evaluated: list[list[EvaluatedShard]]
) -> Evaluation:
    """The mean held-out reward; also to MLflow, with what the reward functions log as eval/NAME."""
    store = run.files.store
    shards = [shard for part in evaluated for shard in part]
    played = [shard.ref.of_policy(store)[["reward", "status"]] for shard in shards]
    samples = BatchRef.concat(played)
    rewards, _ = samples.fetch_numpy(store, "reward")
    status, _ = samples.fetch_numpy(store, "status")
    good = rewards[~np.isnan(rewards)].astype(np.float64)
    assert run.last is not None
    done = Evaluation(
        version=run.head,
        reward=float(good.mean()) if len(good) else math.nan,
        error=float(good.std() / math.sqrt(len(good))) if len(good) else math.nan,
        samples=len(rewards),
        failed=len(rewards) - len(good),
        truncated=int((status == SampleStatus.TRUNCATED).sum()),
        on=manner(run, evaluation),
    )
    logged = pooled(shard.metrics for shard in shards)
    metrics = {f"eval/{name}": metric.mean for name, metric in logged.items()}
    if len(good):
        metrics |= {"eval/reward": done.reward, "eval/error": done.error}
    if metrics:
        run.tracker.log(run.last, metrics)
    return done


def sampling_of(run: Run, evaluation: EvaluationConfig) -> Sampling:
    """As in the steps, or always the likeliest token."""
    asked = Sampling.of(run.config.rollout, evaluation.samples)
    return dataclasses.replace(asked, top_k=1, top_p=1.0) if evaluation.greedy else asked


def manner(run: Run, evaluation: EvaluationConfig) -> str:
    """What two evaluations must have in common to be compared."""
    data = run.config.data.model_dump(mode="json", exclude=ORDER)
    episodes = run.config.episodes
    played = [] if episodes is None else [episodes.model_dump(mode="json", exclude=HOW_FAST)]
    if run.config.opponent is not None:  # whatever it is called
        played[0]["opponent"]["version"] = run.engines.opponents.weights.digest
    return key_of(
        "evaluation",
        open_source(evaluation.source).digest,
        evaluation.rows,
        sampling_of(run, evaluation).identity | {"seed": None},
        run.config.rewards.model_dump(mode="json"),
        data,
        *played,
    )
