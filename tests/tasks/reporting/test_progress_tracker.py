"""What is summed up of the steps under way, of their phases and of the time that is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engines.workers.engine import RunningCall
from storage.runs.live import Phase, Progress
from tasks.reporting.progress import ProgressTracker
from tasks.run.attempts import Attempt
from tasks.run.events import (
    AttemptBegan,
    AttemptEnded,
    EnginesReady,
    EngineStarted,
    Event,
    Listeners,
    ShardSampled,
    ShardsScored,
    StepBegan,
    StepCommitted,
    WeightsPublished,
    WorkersAsked,
)
from tasks.run.machinery import Work


class Run:
    """A run whose clock the test moves."""

    def __init__(self, steps: int = 20) -> None:
        self.now = 100.0
        self.listeners = Listeners()
        self.tracker = ProgressTracker(steps, clock=lambda: self.now)
        self.tracker.listen(self.listeners)

    def tell(self, *events: Event) -> None:
        for event in events:
            self.listeners.tell(event)

    @property
    def progress(self) -> Progress:
        return self.tracker.progress()

    @property
    def phases(self) -> dict[str, Phase]:
        return {phase.name: phase for phase in self.progress.phases}


def attempt(stage: str, step: int = 1, shard: int | None = None) -> Attempt:
    return Attempt(step=step, stage=stage, shard=shard, number=1, started=0.0)


def committed(step: int) -> StepCommitted:
    record: Any = SimpleNamespace(step=step)
    return StepCommitted(record=record, metrics={}, scored=[], attempts=[], snapshot=False)


def running(role: str, method: str, phase: str) -> RunningCall:
    return RunningCall(role=role, method=method, token="", call="", age=0.0, phase=phase)


def test_shards_are_sampled_and_scored() -> None:
    run = Run()
    run.tracker.seen(Work(tokens={"rollout-0": 1000}))
    run.tell(StepBegan(step=1, shards=4))
    run.now += 4.0
    run.tracker.seen(Work(tokens={"rollout-0": 1400, "rollout-1": 200}))
    run.tell(ShardSampled(step=1, tokens=100), AttemptBegan(attempt=attempt("reward", shard=1)))
    run.now += 1.0
    found = run.phases
    assert found["sampling"].done == 1
    assert found["sampling"].seconds == 5.0
    assert found["sampling"].note == "600 tokens, 150/s"
    assert (found["scoring"].done, found["scoring"].total, found["scoring"].seconds) == (0, 4, 1.0)
    run.tell(ShardsScored(step=1, shards=1), AttemptEnded(attempt=attempt("reward", shard=1)))
    assert set(run.phases) == {"sampling"}, "nothing that was sampled waits for its rewards"
    run.tell(*[ShardSampled(step=1, tokens=100)] * 3)
    assert set(run.phases) == {"scoring"}
    run.tell(ShardsScored(step=1, shards=3))
    assert run.phases == {}


def test_an_engine_that_was_started_anew_counts_from_nothing() -> None:
    run = Run()
    run.tracker.seen(Work(tokens={"rollout-0": 1000}))
    run.tell(StepBegan(step=1, shards=4))
    run.now += 2.0
    run.tracker.seen(Work(tokens={"rollout-0": 50}))
    assert run.phases["sampling"].note == "50 tokens, 25/s"


def test_each_stage_is_told_by_the_engines_that_work_on_it() -> None:
    run = Run()
    run.tell(StepBegan(step=1, shards=0))
    run.tell(*(AttemptBegan(attempt=attempt(stage)) for stage in ("logprob", "update", "values")))
    run.tracker.seen(
        Work(
            calls=[
                running("rollout", "generate", ""),
                running("actor", "update", "meeting the other ranks"),
                running("actor", "update", "micro-batch 8 of 8"),
                running("ref", "logprobs", "micro-batch 1 of 5"),
            ]
        )
    )
    assert {name: (one.done, one.total) for name, one in run.phases.items()} == {
        "log-probs": (0, 5),
        "update": (7, 8),
        "values": (None, None),
    }


def test_a_stage_of_several_calls_is_one_phase_until_the_last_ends() -> None:
    run = Run()
    run.tell(StepBegan(step=1, shards=0))
    parts = [attempt("advantage", shard=number) for number in (1, 2)]
    run.tell(AttemptBegan(attempt=parts[0]))
    run.now += 3.0
    run.tell(AttemptBegan(attempt=parts[1]), AttemptEnded(attempt=parts[0]))
    assert run.phases["advantages"].seconds == 3.0
    run.tell(AttemptEnded(attempt=parts[1]))
    assert run.phases == {}


def test_bytes_of_a_version_are_said_once_they_are_known() -> None:
    run = Run()
    for _ in range(2):
        run.tell(AttemptBegan(attempt=attempt("weight_sync")))
        assert run.phases["weight sync"].note == ""
        run.tell(WeightsPublished(version=1, nbytes=3 * 2**30))
        assert run.phases["weight sync"].note == "loading 3.0 GiB"
        run.tell(AttemptEnded(attempt=attempt("weight_sync")))


def test_the_oldest_step_under_way_is_the_one_at_the_head() -> None:
    run = Run()
    run.tell(StepBegan(step=3, shards=2), StepBegan(step=4, shards=2))
    run.tell(AttemptBegan(attempt=attempt("update", 3)))
    assert run.progress.step == 3
    assert set(run.phases) == {"sampling", "sampling, step 4", "update"}
    run.tell(AttemptEnded(attempt=attempt("update", 3)), committed(3))
    assert run.progress.step == 4
    assert set(run.phases) == {"sampling"}


def test_the_time_left_goes_by_the_last_steps_and_not_the_first() -> None:
    run = Run(steps=10)
    assert run.progress.seconds_left is None
    for step, seconds in enumerate([90.0, 10.0, 20.0], 1):
        run.tell(StepBegan(step=step, shards=1))
        assert (run.progress.seconds_left is None) == (step == 1)
        run.now += seconds
        run.tell(committed(step))
    run.tell(StepBegan(step=4, shards=1))
    assert run.progress.seconds_left == 7 * 15.0
    run.now += 5.0
    assert run.progress.seconds_left == 7 * 15.0 - 5.0
    run.now += 1000.0
    assert run.progress.seconds_left == 0.0


def test_each_engine_that_starts_has_a_phase_until_all_are_ready() -> None:
    run = Run()
    run.tell(WorkersAsked(starts=dict))
    run.now += 5.0
    doing = run.progress.doing
    assert doing is not None
    assert (doing.name, doing.seconds) == ("Starting workers and engines", 5.0)
    assert run.tracker.start_seen({"train-0": "building", "rollout-0": "vLLM: 3523536 bytes"}) == (
        "Starting engines: rollout-0: vLLM: 3.4 MiB; train-0: building"
    )
    run.now += 2.0
    run.tracker.start_seen({"train-0": "meeting the other ranks"})
    assert run.phases == {
        "train-0": Phase(name="train-0", note="meeting the other ranks", seconds=2.0)
    }
    run.tell(EngineStarted(waiting=("rollout",)))
    assert run.tracker.start_seen({}) == "Starting engines: rollout"
    run.tell(EngineStarted(waiting=()))
    assert run.tracker.start_seen({}).startswith("Loading the first weights")
    run.tell(EnginesReady(last=None, snapshot=False))
    assert run.progress.doing is None


def test_what_was_seen_of_the_step_before_is_not_taken_for_this_one() -> None:
    run = Run()
    run.tracker.seen(Work(tokens={"rollout-0": 100}))
    run.tell(StepBegan(step=1, shards=1))
    run.tell(AttemptBegan(attempt=attempt("update")))
    run.now += 1.0
    calls = [running("actor", "update", "micro-batch 8 of 8")]
    run.tracker.seen(Work(tokens={"rollout-0": 300}, calls=calls))
    assert run.phases["update"].total == 8
    run.now += 1.0
    run.tell(ShardSampled(step=1, tokens=900), AttemptEnded(attempt=attempt("update")))
    run.tell(committed(1), StepBegan(step=2, shards=2))
    run.now += 1.0
    run.tell(AttemptBegan(attempt=attempt("update", 2)))
    assert run.phases["sampling"].note == ""
    assert run.phases["update"].total is None
    run.tracker.seen(Work(tokens={"rollout-0": 1000}, calls=calls))
    assert run.phases["update"].total == 8
    assert run.phases["sampling"].note == ""
    run.now += 1.0
    run.tracker.seen(Work(tokens={"rollout-0": 1040}))
    assert run.phases["sampling"].note.startswith("40 tokens, ")


def test_of_steps_that_sample_at_once_each_has_the_tokens_of_its_own_shards() -> None:
    run = Run()
    run.tell(StepBegan(step=1, shards=2), StepBegan(step=2, shards=2))
    run.tracker.seen(Work(tokens={"rollout-0": 5000}))
    run.tell(ShardSampled(step=1, tokens=40))
    assert run.phases["sampling"].note.startswith("40 tokens, ")
    assert run.phases["sampling, step 2"].note == ""
