"""The advantage task: rewards of all shards become token advantages of the groups that train."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task

from storage.batches.refs import BatchRef
from storage.objects.digests import key_of
from tasks.results import LeftOver, Scored, TrainBatch
from tasks.reward import samples_of
from tasks.run.retries import OPTIONS, attempted
from tasks.run.run import Run

ADDED = ("old_logprobs", "sum_pi_squared", "ref_logprobs", "values")  # by the train engines


@task(name="advantage", task_run_name="advantage", **OPTIONS)
def advantage(
    run: Run,
    step: int,
    scored: list[Scored],
    logprobs: BatchRef | None,
    values: BatchRef | None = None,
    greedy: Sequence[Scored] = (),
) -> TrainBatch:
    """Estimate advantages and choose the samples that train.

    A group with a failed sample follows rewards.on_failure; a group that algorithm.selection
    leaves out is counted as filtered. Neither reaches the update.
    """
    run.gate.check_turn(step)
    samples = samples_of(run, step, scored)
    for columns in (logprobs, values):
        if columns is not None:
            samples = samples.with_columns(columns[[n for n in ADDED if n in columns.names]])
    baselines = samples_of(run, step, greedy) if greedy else None
    key = key_of(
        "advantage",
        samples.to_json(),
        None if baselines is None else baselines.to_json(),
        run.algorithm.model_dump(mode="json"),
    )
    out_key = run.files.stage_key(step, "advantage", 1, key)
    with attempted(run, step, "advantage") as attempt:
        result = run.engines.scorers.call(
            "advantages",
            run.call_id(step, f"advantages-{key}"),
            attempt.assignment,
            samples=samples,
            baselines=baselines,
            algorithm=run.algorithm,
            out_key=out_key,
            version=step - 1,
            left_out=run.left_over.get(step, LeftOver()).samples,
        )
    return TrainBatch(
        ref=result.ref,
        trained=result.trained,
        filtered=result.filtered,
        dropped=result.dropped,
        metrics=result.metrics,
        baselines=baselines,
    )
