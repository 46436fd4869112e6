"""The commit task: one atomic write makes a step part of the run; then it is shown to people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter

from prefect import task
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from pydantic import JsonValue

from engines.meanings import VERSIONS
from engines.rewards.runner import code_digest
from storage.runs.commit_log import Commit, Ledger
from storage.runs.commit_log import commit as write_commit
from storage.runs.curves import are_due, write_curves
from storage.runs.retention import removed_versions, sweep
from tasks.results import (
    LeftOver,
    Prompts,
    Scored,
    StepSummary,
    Synced,
    TrainBatch,
    Updated,
    frames_of,
    nodes_of,
)
from tasks.reward import samples_of
from tasks.run.clock import BOUND
from tasks.run.events import Note, StepCommitted
from tasks.run.features import judged
from tasks.run.features import tidy as tidied
from tasks.run.flow_options import result_of
from tasks.run.metrics import logged_metrics, step_metrics
from tasks.run.run import Run
from tasks.run.run_record import decay_steps
from tasks.run.stage import OPTIONS, attempted
from tasks.weight_sync import weight_sync


@task(name="snapshot", task_run_name="snapshot", **OPTIONS)
def snapshot(run: Run, step: int, updated: Updated) -> Updated:
    """Store the trainers' whole state, from which a lost gang or a resumed run is rebuilt.

    The policy's comes last: what retention keeps goes by its snapshots.
    """
    with (
        attempted(run, step, "snapshot") as attempt,
        run.engines.holding(attempt.assignment, *run.config.trained_roles),
    ):
        for trainer in run.engines.trained:
            trainer.snapshot(updated.version)
    return updated


def sync_and_commit(
    run: Run,
    step: int,
    prompts: PrefectFuture[Prompts] | Prompts,
    scored: Sequence[PrefectFuture[Scored] | Scored],
    batch: PrefectFuture[TrainBatch],
    updated: PrefectFuture[Updated],
    *others: PrefectFuture[Updated],
) -> StepSummary:
    """What every step ends with: the engines that sample get its weights, and it is committed.

    Between the two a snapshot is stored, if one is due; before both where roles share devices, which
    the policy would have to be given once more. Raises the failure of the first task of the step that
    failed. `others`: updates of what is trained beside the policy.
    """
    step_prompts = prompts if isinstance(prompts, Prompts) else prompts.result()
    due = run.clock.snapshot_due(step, step_prompts.cursor, len(run.clock.carried[step + 1]))
    if due and run.config.cluster.share_devices:
        updated = snapshot.submit(run, step, updated, wait_for=[*others])  # type: ignore[call-overload]
    synced = weight_sync.submit(run, step, updated, due)  # type: ignore[call-overload]
    if due and not run.config.cluster.share_devices:
        trained = [synced, *others]
        updated = snapshot.submit(run, step, updated, wait_for=trained)  # type: ignore[call-overload]
    committed = commit.submit(run, step, prompts, scored, batch, updated, synced, others)  # type: ignore[call-overload]
    return result_of(committed)


@task(name="commit", task_run_name="commit", **OPTIONS)
def commit(
    run: Run,
    step: int,
    prompts: Prompts,
    scored: list[Scored],
    batch: TrainBatch,
    updated: Updated,
    synced: Synced,
    others: Sequence[Updated],
) -> StepSummary:
    """Commit a step: refs, versions, cursor, ledger, metrics, attempts; then HEAD moves.

    Before this nothing of the step counts, after it nothing of it can be lost. What is only shown,
    and the removal of what is not kept, follow in the background, while the next step samples.
    """
    run.attempts.charge(step)
    metrics = step_metrics(run, step, prompts, scored, batch, updated, synced)
    for other in others:
        metrics |= other.metrics
    metrics |= logged_metrics(scored, metrics)
    left_over = run.clock.left_over.get(step, LeftOver())
    samples = samples_of(run, step, scored)
    additions = [feature.commit(run, step, prompts, samples) for feature in run.features]
    for addition in additions:
        metrics |= addition.metrics
    verdicts = judged(run.features, run, step, metrics)
    metrics |= {BOUND: float(run.gate.max_staleness)} if run.config.max_staleness else {}
    metrics |= verdicts.metrics
    metrics |= run.marks
    refs = {
        "prompts": prompts.new,
        "samples": samples if batch.taught is None else samples.with_columns(batch.taught),
        "nodes": nodes_of(scored),
        "frames": frames_of(shard for part in scored for shard in part.sampled),
        "clusters": scored[0].clusters,
        "batch": batch.ref,
        "baselines": batch.baselines,
        "carried": left_over.carried.prompts,
        "begun": left_over.carried.begun,
        "left_out": left_over.samples,
        **{name: ref for addition in additions for name, ref in addition.refs.items()},
    }
    record = Commit(
        step=step,
        parent=run.head,
        refs={name: ref for name, ref in refs.items() if ref is not None},
        version_in=min(
            (shard.weights for part in scored for shard in part.sampled), key=attrgetter("version")
        ),
        version_out=synced.weights,
        cursor=prompts.cursor.to_json(),
        rng={"seed": run.config.seed, "rollout_seed": run.config.rollout.seed},
        ledger=ledger_after(run.clock.position.ledger, prompts, batch, left_over),
        first_group=run.clock.first_group(step),
        group_size=run.config.samples_per_prompt,
        carried=list(left_over.carried.groups),
        readmissions=prompts.readmissions,
        dropped_rows=prompts.dropped,
        reward_code={
            code_digest(part.code): [asdict(function) for function in part.code] for part in scored
        },
        meanings=dict(VERSIONS),
        code_files=run.code_files,
        update=update_settings(run, updated),
        metrics=metrics,
        guards=verdicts.records,
        attempts=[attempt.record() for attempt in run.attempts.of(step)],
        algorithm=run.algorithm.model_dump(mode="json"),
    )
    record = write_commit(run.files, record, run.lease)
    attempts = run.attempts.of(step)
    for feature in run.features:
        feature.committed(run, record)
    run.advance(record)
    event = StepCommitted(
        record=record,
        metrics=metrics,
        scored=scored,
        attempts=attempts,
        snapshot=run.clock.snapshot_after(record),
    )
    nbytes = metrics.get("store/bytes_written", 0.0)
    run.tell(event, last=lambda: tidy(run, step, nbytes))
    return StepSummary(
        step=step, version=updated.version, seconds=metrics["time/step"], metrics=metrics
    )


def update_settings(run: Run, updated: Updated) -> dict[str, JsonValue]:
    """What an update is made with besides the batch and the algorithm, to make it again."""
    config = run.config
    pool = config.cluster.pools[config.cluster.roles.actor]
    devices = updated.made_on
    return {
        **({} if devices is None else {"made_on": asdict(devices)}),
        "train": config.train.model_dump(mode="json"),
        "seed": config.seed,
        "steps": decay_steps(config, run.files),  # where a decaying schedule ends
        # Of an elastic update the number of workers changes nothing.
        "ranks": 1 if config.train.engine == "elastic" else pool.workers,
        "threads": pool.threads,
        "dtype": config.rollout.dtype,
    }


def ledger_after(
    before: Ledger, prompts: Prompts, batch: TrainBatch, left_over: LeftOver
) -> Ledger:
    """What became of the prompts up to a step: those that it drew, and those carried to it."""
    dropped = Counter(before.dropped)
    dropped.update({reason: len(rows) for reason, rows in prompts.dropped.items()})
    dropped.update(batch.dropped)
    dropped.update(left_over.dropped)
    filtered_by = Counter(before.filtered_by)
    filtered_by.update(batch.filtered_by)
    return Ledger(
        drawn=before.drawn + prompts.drawn,
        trained=before.trained + batch.trained,
        filtered=before.filtered + batch.filtered,
        filtered_by=dict(filtered_by),
        dropped=dict(dropped),
        in_flight=len(left_over.carried),
        quarantined=before.quarantined + prompts.passed_over,
    )


def tidy(run: Run, step: int, nbytes: float) -> None:
    """Keep the curves, if they are due, and remove what the settings do not keep.

    `nbytes`: that the step wrote to the store.
    Once everybody has heard of the step: which versions are registered is known then.
    """
    if are_due(step):
        write_curves(run.files, step, run.history.steps())
    keep = run.config.store
    removed = tidied(run.config, run.files, run.head)
    removed += sweep(
        run.files,
        keep_versions=keep.keep_versions,
        keep_steps=keep.keep_steps,
        keep_snapshots=keep.keep_snapshots,
        rebuilt_from=max(run.start, run.head - run.config.rollback_steps),
        tagged={*run.tracking.retained(), *run.to_be_evaluated()},
        may_go=run.tracking.let_go,
    )
    if removed:
        run.tracking.removed(removed_versions(run.files, removed))
        get_run_logger().info("Removed by store.keep_*: %s", ", ".join(removed))
    if warning := run.disk.after(step, nbytes):
        run.tell(Note(text=warning, warning=True))
