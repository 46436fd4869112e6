"""The update task: one step's batch trains the policy, on all ranks of the gang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from prefect import task

from configs.cluster import Role
from configs.train import TrainConfig
from engines.train.batching.mfu import CostModel
from engines.train.batching.stored_plan import Planner, PlanRequest
from engines.train.contract import UnitAttempt
from engines.train.trainer import Trainer
from engines.workers.pool import Assignment
from storage.batches.forest import LENGTHS, PARENTS
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from tasks.results import TrainBatch, Updated
from tasks.run.attempts import Attempt
from tasks.run.contract import EngineRole
from tasks.run.roles import ACTOR, PLANNER
from tasks.run.run import Run
from tasks.run.run_record import lone_rank_plans
from tasks.run.stage import OPTIONS, Part, attempted, discard, spread

T = TypeVar("T", bound=Trainer)

PLANNED_ROWS = 1024  # of a batch from which on its plan takes longer than to have it made elsewhere


@task(name="update", task_run_name="update", **OPTIONS)
def update(run: Run, step: int, batch: TrainBatch) -> Updated:
    """Apply the step's update to version step - 1.

    A gang that broke is formed anew and brought back to version step - 1 from a snapshot and the
    stored batches, so that a retry never applies an update twice.
    """
    run.gate.check_turn(step)
    with (
        planned(run, step, ACTOR, "actor", batch, "update") as plan,
        attempted(run, step, "update") as attempt,
        run.engines.holding(attempt.assignment, "actor"),
    ):
        result = run.engines[ACTOR].update(step, batch.ref, run.algorithm, plan)
    run.attempts.add(*map(partial(of_unit, step), result.units))
    return Updated(version=step, metrics=dict(result.metrics), made_on=result.made_on)


def of_unit(step: int, tried: UnitAttempt) -> Attempt:
    """Who computed a unit of an elastic update, or failed to."""
    return Attempt(
        step=step,
        stage="unit",
        shard=tried.unit,
        number=tried.number,
        started=tried.started,
        ended=tried.ended,
        error=tried.error,
        assignment=Assignment(worker=tried.worker),
    )


@contextlib.contextmanager
def planned(
    run: Run, step: int, trained: EngineRole[T], role: Role, batch: TrainBatch, stage: str
) -> Iterator[BatchRef | None]:
    """The micro-batches of a large update, made once by a cpu worker; None: each rank makes them.

    They are removed when the update has succeeded: a replay makes its own.
    """
    if len(batch.ref) < PLANNED_ROWS:
        yield None
        return
    trainer = run.engines[trained]
    with attempted(run, step, stage):
        cost = trainer.cost(step - 1)
    part = plan_of(run, step, batch, stage, trainer.world, run.config.train_of(role), cost)
    plans = spread(run, step, stage, [part], BatchRef)
    yield plans[0]
    discard(run, [part], plans)


def plan_of(
    run: Run,
    step: int,
    batch: TrainBatch,
    stage: str,
    ranks: int,
    config: TrainConfig,
    cost: CostModel,
) -> Part[BatchRef]:
    """The call that cuts an update into micro-batches on so many ranks, balanced by `cost`."""
    limits: dict[str, int] = {
        "world": ranks // config.sequence_parallel,
        "budget": config.planned_tokens,
        "mini_batches": config.mini_batches,
    }
    if config.tree_training:  # named only then: plans that an older run has stored are found again
        limits["tree_training"] = True
    lone_rank = lone_rank_plans(run.files)
    named = [lone_rank] if lone_rank != "balanced" else []  # likewise
    key = key_of("plan", batch.ref.to_json(), limits, asdict(cost), *named)
    names = ["prompt_ids", "response_ids", "group_id", "player"]
    names += ["author", "frame"] if cost.patches else [LENGTHS, PARENTS]
    request = PlanRequest(
        batch=batch.ref[[name for name in names if name in batch.ref.names]],
        world=limits["world"],
        budget=limits["budget"],
        mini_batches=limits["mini_batches"],
        cost=cost,
        lone_rank=lone_rank,
        tree_training=config.tree_training,
    )
    out_key = run.files.stage_key(step, stage, "plan", key)
    return Part.of(run.engines[PLANNER], Planner.plan, request=request, out_key=out_key)
