"""The reward task: score one shard as soon as it is sampled, on a cpu worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from prefect import task
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger

from engines.data.contract import SampleFailure, Scorer, ScoreRequest, ScoreResult
from engines.rewards.protocol import TrainerState
from storage.batches.columns import EXTRA
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import key_of
from storage.prompts.cursor import Cursor
from tasks.results import FailureCause, Scored, WholeShards, samples_of_shards
from tasks.run.contract import StageView
from tasks.run.events import ShardsScored
from tasks.run.features import ScoredFirst, features_of
from tasks.run.roles import SCORER
from tasks.run.run import Run
from tasks.run.stage import OPTIONS, Stage


@task(name="reward", task_run_name="reward {number}/{count}", **OPTIONS)
def reward(run: Run, step: int, sampled: WholeShards, number: int, count: int) -> Scored:
    """Score the completions of the shards that one rollout task sampled (tasks counted from 1).

    An exception, a time-out or a crash in a reward function is not retried and is not a reward: the
    sample is marked failed, and the function's traceback goes to this task's log. What the function
    logs as TRL's do goes with the scores: columns of log_extra into their batch, values of
    log_metric to the commit (tasks/run/metrics.py).
    """
    result = scored(run, step, sampled, number)
    run.tell(ShardsScored(step=step, shards=len(sampled)))
    return result


def reward_shards(
    run: Run,
    step: int,
    sampled: Sequence[PrefectFuture[WholeShards] | WholeShards],
    before: Sequence[Scored] = (),
) -> list[PrefectFuture[Scored]]:
    """A reward task for what each rollout task sampled; before: what the step has scored already."""
    last = len(before) + len(sampled)
    return [
        reward.submit(run, step, shards, number, last)  # type: ignore[arg-type]
        for number, shards in enumerate(sampled, len(before) + 1)
    ]


def scored(run: Run, step: int, sampled: WholeShards, number: int) -> Scored:
    """Shards with their rewards; failures are logged. `number` tells the calls of a step apart."""
    rewards = run.config.rewards.model_dump(mode="json")
    samples = samples_of_shards([sampled])
    prompts = sampled[0].prompts
    if len(sampled) > 1:
        prompts = BatchRef.concat([shard.prompts for shard in sampled])
    state = trainer_state(run, step)
    key = key_of("reward", samples.to_json(), rewards, asdict(state))
    request = ScoreRequest(prompts=prompts, samples=samples, trainer_state=state)
    ref, result = score(run, step, "reward", number, key, request)
    return Scored(
        sampled=sampled,
        ref=ref,
        failures=result.failed,
        code=result.code,
        seconds=result.seconds,
        metrics=result.metrics,
        causes=tuple(
            FailureCause(function=function, error=error, samples=len(failed))
            for (function, error), failed in by_cause(result.failures).items()
        ),
    )


def score(
    run: StageView,
    step: int,
    stage: str,
    number: int,
    key: str,
    request: ScoreRequest,
) -> tuple[BatchRef, ScoreResult]:
    """Samples with their scores, and what became of the call; failures are logged.

    Args:
        run: the run.
        step: for which they are scored.
        stage: what for.
        number: of the call among those of the stage.
        key: digest of what is scored, and by what.
        request: without the reward models' scores, which are made first.
    """
    first = ScoredFirst(step=step, number=number, key=key, request=request)
    features = features_of(run.config)
    models = next(filter(None, (feature.scores(run, first) for feature in features)), None)
    piece = Stage(run=run, step=step, name=stage, key=key, shard=number)
    result = piece.call(
        run.engines[SCORER],
        Scorer.score,
        request=replace(request, models=models),
        out_key=piece.out_key,
    )
    for (function, error), failed in by_cause(result.failures).items():
        numbers = ", ".join(map(str, failed))
        trace = result.tracebacks.get(error, "")
        text = f"Scoring failed in {function} for sample {numbers}: {error}\n{trace}"
        get_run_logger().error("%s", text.rstrip())
    samples = request.samples.drop(["status"])
    if models is not None:  # with what they said of those that they could not score
        samples = samples.with_columns(models.ref)  # so a commit names all that was stored
    # With score/<function> too, of a failed sample not a number.
    return samples.with_columns(result.ref), result


def trainer_state(run: Run, step: int) -> TrainerState:
    """Where the run stands while the samples of a step are scored, as reward functions are told."""
    return state_at(step, run.config.steps, run.clock.drawn[step])


def state_at(step: int, steps: int, began: Cursor) -> TrainerState:
    """The same of any step out of `steps`, before which the data was drawn up to `began`."""
    epoch = began.epoch + began.position / began.size
    return TrainerState(global_step=step - 1, max_steps=steps, epoch=epoch)


def samples_of(run: Run, step: int, scored: Sequence[Scored]) -> BatchRef:
    """The scored shards as one batch, [N] samples.

    A column of log_extra that the functions gave for some shards only is null in the others.
    """
    names = dict.fromkeys(n for shard in scored for n in shard.ref.names if n.startswith(EXTRA))
    parts = []
    for number, shard in enumerate(scored, 1):
        ref = shard.ref
        if missing := [name for name in names if name not in ref.names]:
            key = run.files.stage_key(step, "reward", f"{number}-null", key_of(missing, len(ref)))
            nulls: dict[str, object] = {name: [None] * len(ref) for name in missing}
            ref = ref.with_columns(write_batch(run.store, key, nulls))
        parts.append(ref)
    return BatchRef.concat(parts)


def by_cause(failures: Sequence[SampleFailure]) -> dict[tuple[str, str], list[int]]:
    """Sample numbers by function and error, so that one mistake is told once."""
    samples_by_cause: dict[tuple[str, str], list[int]] = {}
    for failure in failures:
        samples_by_cause.setdefault((failure.function, failure.error), []).append(failure.sample)
    return samples_by_cause
