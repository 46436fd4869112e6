"""Tries of evaluations are of no step: the commit that comes next counts them, once."""

from __future__ import annotations

from engines.workers.devices import HeldSeconds
from engines.workers.pool import Assignment
from tasks.run.attempts import EVALUATION, Attempt, AttemptLog, EvaluationLog


def tried(step: int, stage: str, seconds: float, shard: int | None = None) -> Attempt:
    held = HeldSeconds(seconds={"rollout": seconds})
    return Attempt(
        step=step, stage=stage, shard=shard, number=1, started=1.0, assignment=Assignment(held=held)
    )


def told(log: AttemptLog, step: int) -> list[tuple[str, float]]:
    return [(one.stage, one.assignment.held.seconds["rollout"]) for one in log.of(step)]


def test_what_evaluations_tried_goes_with_the_step_that_is_committed_next() -> None:
    log = AttemptLog()
    evaluation = EvaluationLog(log)
    log.add(tried(3, "rollout", 1.0))
    evaluation.add(tried(0, "evaluate", 2.0, shard=1))
    log.charge(3)
    evaluation.add(tried(0, "score", 4.0, shard=1))  # while the commit is written
    assert told(log, 3) == [("rollout", 1.0), (EVALUATION, 2.0)]
    log.charge(3)  # the commit is tried again
    assert told(log, 3) == [("rollout", 1.0), (EVALUATION, 2.0), (EVALUATION, 4.0)]
    log.add(tried(4, "rollout", 8.0))
    log.committed(3)
    evaluation.add(tried(0, "evaluate", 16.0, shard=2))
    log.charge(4)
    assert told(log, 3) == []
    assert told(log, 4) == [("rollout", 8.0), (EVALUATION, 16.0)]
    assert all(one.step == 4 for one in log.of(4))


def test_an_evaluation_knows_what_its_shards_held() -> None:
    evaluation = EvaluationLog(AttemptLog())
    evaluation.add(tried(0, "evaluate", 2.0, shard=1), tried(0, "score", 1.0, shard=1))
    evaluation.add(tried(0, "evaluate", 4.0, shard=2), tried(0, "evaluation prompts", 0.5))
    assert evaluation.worker_seconds(1) == {"rollout": 3.0}
    assert evaluation.worker_seconds(2) == {"rollout": 4.0}
    assert evaluation.worker_seconds(None) == {"rollout": 0.5}
