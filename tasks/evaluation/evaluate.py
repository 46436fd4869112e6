"""One policy version by some suites: asked, scored, summed up, and stored under its content.

The only evaluation that there is: a run's, between its steps or beside them (schedule.py), and that
of versions of the past (back_fill.py). Shards that are finished are read from the store, so nothing
is asked twice, whoever asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from prefect import flow, task
from pydantic import JsonValue

from configs.overrides import ConfigError
from engines.data.contract import PromptMaker, Scorer, ScoreRequest
from engines.failures import WeightMismatch
from engines.rewards.failing_samples import LoggedMetric, pooled
from engines.rewards.protocol import TrainerState
from engines.rewards.runner import RewardCode, code_digest
from engines.workers.messages import CallId
from storage.batches.refs import BatchRef
from storage.evaluations.results import (
    EvaluationFiles,
    EvaluationResult,
    find_result,
    note,
    prompts_key,
    write_result,
)
from storage.objects.documents import key_of
from storage.runs.weights import WeightsRef
from storage.tracking.cost import calls_cost
from tasks.episodes import complete
from tasks.evaluation.engines import EvaluationPlace
from tasks.evaluation.summary import counts_of, metrics_of, scores_of
from tasks.results import Sampled
from tasks.reward import score
from tasks.run.attempt_log import EvaluationLog, summed
from tasks.run.episode_driver import EpisodeDriver
from tasks.run.events import VersionEvaluated
from tasks.run.flow_options import TaskThreads, result_of
from tasks.run.metrics import pools_of
from tasks.run.retries import OPTIONS, attempted
from tasks.run.role_table import prompters
from tasks.run.roles.role import ByRole
from tasks.run.roles.sampling import OPPONENT, ROLLOUT
from tasks.run.roles.scoring import SCORER
from tasks.run.run_view import Caller
from tasks.run.shard_driver import ShardDriver, ShardRange, task_runs
from tasks.run.stage import Stage
from tasks.run.suite import Suite
from tasks.sampling import SamplingStage

STEP_NUMBER = 0  # of every call and seed: the same questions are asked alike of every version


@dataclass(frozen=True, kw_only=True, slots=True)
class SuitePrompts:
    """The questions of a suite, and what scores the answers."""

    prompts: BatchRef
    dropped: dict[str, list[int]]  # rows that gave no prompt, by reason
    code: tuple[RewardCode, ...]  # of the functions that are called


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedShard:
    """Some prompts, answered and scored."""

    ref: BatchRef  # the samples with their rewards
    metrics: dict[str, LoggedMetric]  # what the reward functions gave to log_metric
    code: tuple[dict[str, JsonValue], ...]  # the functions that scored
    # By pool, of its calls; of a shard that a dead process had sampled, of its scoring alone.
    worker_seconds: dict[str, float]


class Evaluator:
    """What evaluates versions of a run. With slots and no dataclass, as tasks.run.run.Run."""

    __slots__ = ("back_fill", "caller", "keep", "place", "suites")

    def __init__(
        self,
        caller: Caller,
        place: EvaluationPlace,
        suites: Mapping[str, Suite],
        back_fill: bool = False,
        keep: Callable[[EvaluationResult], object] = lambda result: None,
    ) -> None:
        """`back_fill`: of versions of the past, on workers of its own. `keep`: has a result first."""
        self.caller, self.place = caller, place
        self.suites, self.back_fill, self.keep = suites, back_fill, keep


class Questioning:
    """A suite on a version, as the tasks that sample and score see it (tasks/run/stage_view.py)."""

    __slots__ = (
        "attempts", "back_fill", "caller", "config", "device_time", "engines", "episodes", "files",
        "name", "number", "shards", "store", "suite", "tell", "weights",
    )  # fmt: skip

    def __init__(
        self, evaluator: Evaluator, suite: Suite, number: int, weights: WeightsRef
    ) -> None:
        """`number`: by which the run counts the version."""
        caller = evaluator.caller
        self.caller, self.suite, self.config = caller, suite, suite.config
        self.number, self.weights = number, weights
        self.name, self.store = caller.name, caller.store
        self.attempts, self.tell = EvaluationLog(caller.attempts), caller.tell
        self.back_fill = evaluator.back_fill
        self.device_time = caller.device_time
        self.engines: ByRole = evaluator.place.engines_of(caller, suite)
        self.files = EvaluationFiles(self.store, "")  # until its key is known
        pools = self.config.cluster.pools
        self.episodes = EpisodeDriver(self.config.episodes, caller.cancelled)
        engines = pools[self.engines[ROLLOUT].pool]
        most = task_runs(pools[self.engines[SCORER].pool], stages=1)
        # As many as the engines take, and some that wait.
        self.shards = ShardDriver(engines.workers * engines.slots + most, most)

    def usable_weights(self, step: int) -> list[WeightsRef]:
        """The version alone; WeightMismatch where the engines are at another one."""
        held = self.engines[ROLLOUT].weights
        if held.digest != self.weights.digest:
            raise WeightMismatch(
                f"The evaluation of version {self.number} found the engines at version "
                f"{held.version}, {held.digest}: an evaluation measures one version."
            )
        return [self.weights]

    def call_id(self, step: int, call: str) -> CallId:
        """A call on the caller's behalf."""
        return CallId(run=self.name, epoch=self.caller.epoch, step=step, call=f"evaluation-{call}")

    @property
    def opponent(self) -> str | None:
        """Digest of the frozen version that plays against the policy, if one does."""
        played = self.config.episodes
        return (
            None
            if played is None or played.opponent is None
            else self.engines[OPPONENT].weights.digest
        )

    def stage(self) -> SamplingStage:
        """For what it samples, and how."""
        return SamplingStage(
            name="evaluate", sampling=self.suite.sampling, source=self.suite.settings.source
        )

    def key_of(self, asked: SuitePrompts) -> str:
        """Of version, questions, sampling and scoring code."""
        models = [one.model_dump(mode="json") for one in self.config.rewards.on_engines]
        return key_of(
            self.weights.digest,
            asked.prompts.to_json(),
            self.suite.sampling.identity,
            self.config.rollout.engine,
            code_digest(asked.code),
            models,
            *self.suite.played(self.opponent),
            *([meanings] if (meanings := self.suite.meanings) else []),
        )


@flow(
    name="evaluation",
    flow_run_name="evaluation {version}",
    validate_parameters=False,
    task_runner=TaskThreads(),  # type: ignore[arg-type]
)
def evaluation(
    evaluator: Evaluator, version: int, weights: WeightsRef
) -> dict[str, EvaluationResult]:
    """All suites on a version that the engines hold; `version`: its number in the run."""
    found = {}
    for name, suite in evaluator.suites.items():
        run = Questioning(evaluator, suite, version, weights)
        try:
            found[name] = _evaluated(run)
        finally:
            run.shards.close()
            run.episodes.close()
        evaluator.keep(found[name])
        run.tell(VersionEvaluated(result=found[name], version=version))
        # Last: what is noted counts as told.
        note(run.caller.files, name, version, run.files.result_key(suite.summing))
    return found


def _evaluated(run: Questioning) -> EvaluationResult:
    """One suite: as it is in the store, or made now."""
    began = time.time()
    asked = result_of(ask.submit(run))
    run.files = EvaluationFiles(run.store, run.key_of(asked))
    known = run.files.result_key(run.suite.summing)
    result = find_result(run.store, known)
    if result is None or result.failed:  # a failure is no result: it is scored again
        count = -(-len(asked.prompts) // run.suite.settings.rows_per_shard)
        evaluated = [
            evaluate_shards.submit(run, asked, shards) for shards in run.shards.ranges(count)
        ]
        summed = summarize.submit(run, asked, evaluated, began)  # type: ignore[arg-type]
        result = result_of(summed)
    return result.known_as(run.suite.name, run.number)


@task(name="evaluation prompts", task_run_name="evaluation prompts", **OPTIONS)
def ask(run: Questioning) -> SuitePrompts:
    """The suite's rows as prompts, and the functions that will score, as they are loaded now."""
    suite, rows = run.suite, run.suite.rows
    out_key = prompts_key(suite.prompts_key)
    record = run.files.finished(out_key)
    if record is None:
        with attempted(run, STEP_NUMBER, "evaluation prompts") as attempt:
            made = prompters(run.engines).call(
                PromptMaker.prompts,
                run.call_id(STEP_NUMBER, f"prompts-{suite.prompts_key}"),
                attempt.assignment,
                rows=rows,
                first_group=0,
                out_key=out_key,
                source=suite.settings.source,
            )
        if made.ref is None:
            raise ConfigError(
                f"The first {len(rows)} rows of {suite.source.name} give the suite {suite.name} no "
                f"prompt of at most {suite.config.data.max_prompt_tokens} tokens. Set its "
                "prompt.max_prompt_tokens higher."
            )
        dropped: dict[str, list[int]] = {}
        for row, reason in made.dropped:
            dropped.setdefault(reason, []).append(row)
        record = run.files.finish(out_key, {"ref": made.ref.to_json(), "dropped": dropped})
    with attempted(run, STEP_NUMBER, "reward code"):
        called = run.engines[SCORER].call(
            Scorer.reward_code, run.call_id(STEP_NUMBER, f"code-{suite.name}")
        )
    return SuitePrompts(
        prompts=BatchRef.from_json(record["ref"]),
        dropped={str(why): list(gone) for why, gone in dict(record["dropped"]).items()},  # type: ignore[call-overload]
        code=tuple(called.values()),
    )


@task(name="evaluate", task_run_name="evaluate {shards}", **OPTIONS)
def evaluate_shards(
    run: Questioning, asked: SuitePrompts, shards: ShardRange
) -> list[EvaluatedShard]:
    """Answers to some shards of the questions, with their scores."""
    return run.shards.drive(
        STEP_NUMBER,
        "evaluate",
        shards,
        lambda shard: evaluated_shard(run, asked.prompts.part(shard - 1, shards.of), shard),
    )


def evaluated_shard(run: Questioning, part: BatchRef, shard: int) -> EvaluatedShard:
    """A shard of prompts (counted from 1), answered and scored, or found so."""
    sampled = complete(run, STEP_NUMBER, part, run.stage(), shard)
    assert isinstance(sampled, Sampled), "only shards that train are left"
    if sampled.stats.digest != run.weights.digest:
        raise WeightMismatch(
            f"Shard {shard} of the evaluation of version {run.number} was answered by weights "
            f"{sampled.stats.digest}, and the version's are {run.weights.digest}."
        )
    scored_as = key_of("scored", sampled.ref.to_json())
    piece = Stage(run=run, step=STEP_NUMBER, name="score", key=scored_as, shard=shard)
    record = piece.finished()
    if record is None:
        request = ScoreRequest(
            prompts=part,
            samples=sampled.ref,
            trainer_state=TrainerState(),  # wherever a run stands, versions are scored alike
            source=run.suite.settings.source,
        )
        ref, result = score(run, STEP_NUMBER, "score", shard, scored_as, request)
        record = {
            "ref": ref.to_json(),
            "metrics": {name: asdict(metric) for name, metric in result.metrics.items()},
            "code": [asdict(one) for one in result.code],
            "worker_seconds": {**run.attempts.worker_seconds(shard)},
        }
        if not result.failed:
            record = piece.finish(record)
    return of_record(record)


def of_record(record: Mapping[str, object]) -> EvaluatedShard:
    """A shard from its record."""
    metrics, code = record["metrics"], record["code"]
    held = record.get("worker_seconds", {})  # an older Refrain counted none
    assert isinstance(metrics, Mapping) and isinstance(code, list) and isinstance(held, Mapping)
    return EvaluatedShard(
        ref=BatchRef.from_json(record["ref"]),
        metrics={name: LoggedMetric(**one) for name, one in metrics.items()},
        code=tuple(code),
        worker_seconds=dict(held),
    )


@task(name="sum up", task_run_name="sum up", **OPTIONS)
def summarize(
    run: Questioning, asked: SuitePrompts, evaluated: list[list[EvaluatedShard]], began: float
) -> EvaluationResult:
    """Metrics and intervals of all shards, as one stored result."""
    shards = [shard for part in evaluated for shard in part]
    samples, settings = BatchRef.concat([shard.ref for shard in shards]), run.suite.settings
    metrics, intervals = metrics_of(scores_of(run.store, samples, settings.right_from), settings)
    logged = pooled(shard.metrics for shard in shards)
    metrics |= counts_of(run.store, samples)
    metrics |= {f"logged/{name}": metric.mean for name, metric in logged.items()}
    result = EvaluationResult(
        key=run.files.key,
        suite=run.suite.name,
        weights=run.weights,
        engine=run.config.rollout.engine,
        on=run.suite.manner(run.opponent),
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        intervals=intervals,
        asked=len(asked.prompts),
        dropped=asked.dropped,
        samples=samples,
        prompts=asked.prompts,
        reward_code={key_of(list(shard.code)): list(shard.code) for shard in shards},
        right_from=settings.right_from,
        seconds=time.time() - began,
        asked_by=run.caller.files.run,
        back_fill=run.back_fill,
        cost=cost_of(run, shards),
    )
    write_result(run.store, run.files.result_key(run.suite.summing), result)
    return result


def cost_of(run: Questioning, shards: Sequence[EvaluatedShard]) -> dict[str, float]:
    """What the evaluation's calls had of devices, those of a process that died too."""
    seconds = [shard.worker_seconds for shard in shards]
    own = run.attempts.worker_seconds(None)  # prompts
    return calls_cost(summed([*seconds, own]), pools_of(run.caller.config))
