"""The commit task: one atomic write makes a step part of the run; then it is shown to people."""

from __future__ import annotations

import time

from prefect import task

from storage.commits import Commit, Ledger, commit as write_commit
from storage.retention import sweep
from tasks.artifacts import show_step
from tasks.metrics import step_metrics
from tasks.results import Prompts, Scored, StepSummary, Synced, TrainBatch, Updated
from tasks.retries import OPTIONS
from tasks.run import Run


@task(name="snapshot", **OPTIONS)
def snapshot(run: Run, step: int, updated: Updated) -> Updated:
    """Write the trainer's whole state, from which a lost gang or a resumed run is rebuilt."""
    run.engines.actor.snapshot(updated.version)
    return updated


@task(name="commit", **OPTIONS)
def commit(
    run: Run,
    step: int,
    prompts: Prompts,
    scored: list[Scored],
    batch: TrainBatch,
    updated: Updated,
    synced: Synced,
) -> StepSummary:
    """Commit a step: refs, versions, cursor, ledger, metrics, attempts; then HEAD moves.

    Before this nothing of the step counts, after it nothing of it can be lost. What is only shown
    (MLflow, artifacts, the terminal's line) follows the commit.
    """
    previous = run.last
    metrics = step_metrics(run, step, prompts, scored, batch, updated, synced)
    record = Commit(
        step=step,
        parent=run.head,
        refs={
            "prompts": prompts.ref,
            "samples": samples_of(scored),
            "batch": batch.ref,
        },
        version_in=previous.version_out if previous else run.first_weights,
        version_out=synced.weights,
        cursor=prompts.cursor.to_json(),
        ledger=add(previous.ledger if previous else Ledger(), prompts, batch),
        metrics=metrics,
        attempts=[attempt.record() for attempt in run.attempts_of(step)],
        algorithm=run.config.algorithm.model_dump(mode="json"),
    )
    write_commit(run.files, record)
    run.advance(record, prompts.cursor)
    summary = StepSummary(
        step=step,
        version=updated.version,
        seconds=time.monotonic() - run.progress.began,
        metrics=metrics,
    )
    run.tracker.step(step, metrics)
    show_step(run, record, scored)
    run.progress.step_done(summary)
    removed = sweep(
        run.files,
        keep_versions=run.config.store.keep_versions,
        keep_steps=run.config.store.keep_steps,
        keep_snapshots=run.config.store.keep_snapshots,
        tagged=run.tracker.tagged,
    )
    if removed:
        run.tracker.removed(step, removed)
    return summary
