"""The engines of a suite: those of the steps where it asks and scores as they do, or its own."""

from __future__ import annotations

import contextvars
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from prefect import flow, task
from pydantic import JsonValue

from configs.cluster import Role
from configs.evaluation import EvaluationConfig
from configs.overrides import ConfigError
from engines.data.contract import PromptMaker, Scorer, ScoreRequest
from engines.failures import WeightMismatch
from engines.rewards.protocol import TrainerState
from engines.rewards.runner import LoggedMetric, RewardCode, code_digest, pooled
from engines.rollout.rollout_pool import RolloutPool
from engines.workers.cluster import Cluster
from engines.workers.engine import CallId, E, EngineSpec
from engines.workers.pool import EnginePool
from storage.batches.refs import BatchRef
from storage.evaluations.results import (
    EvaluationFiles,
    EvaluationResult,
    evaluations_of,
    find_result,
    note,
    notes_of,
    prompts_key,
    write_result,
)
from storage.objects.documents import key_of
from storage.runs.commit_log import version_weights
from storage.runs.weights import MANIFEST, WeightsRef
from storage.tracking.cost import calls_cost
from tasks.evaluation.summary import counts_of, evaluation_metrics, metrics_of, scores_of
from tasks.results import Sampled
from tasks.reward import score
from tasks.rollout import complete
from tasks.run.attempts import EvaluationLog, summed
from tasks.run.contract import ByRole, Caller, Clients, EngineRole, pool_of
from tasks.run.episode_driver import EpisodeDriver
from tasks.run.events import VersionEvaluated
from tasks.run.features import features_of
from tasks.run.flow_options import TaskThreads, result_of
from tasks.run.metrics import pools_of
from tasks.run.roles import (
    ENVIRONMENT,
    EVALUATION,
    OPPONENT,
    ROLLOUT,
    SCORER,
    environment_engine,
    prompters,
    scoring_engine,
)
from tasks.run.run import Run
from tasks.run.shard_driver import ShardDriver, ShardRange, task_runs
from tasks.run.stage import OPTIONS, Stage, attempted
from tasks.run.suite import Suite
from tasks.sampling import SamplingStage


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlace:
    """Where evaluations are made."""

    cluster: Cluster
    rollouts: RolloutPool
    opponents: RolloutPool | None = None
    aside: bool = False  # on a pool that does nothing else
    shared: ByRole | None = None  # of the steps, for suites that ask and score as they do

    def engines_of(self, caller: Caller, suite: Suite) -> ByRole:
        """A suite's engines; building them is left to their first call."""
        if suite.settings.as_run and self.shared is not None:
            return self.shared
        asks = _Asks(caller, suite)
        config, name = suite.config, f"evaluation-{suite.name}"

        def pool(role: Role, what: str, engine: EngineSpec[E], deadline: float) -> EnginePool[E]:
            there: Role = "evaluation" if self.aside else role
            return pool_of(asks, self.cluster, there, f"{name}{what}", engine, deadline)

        clients: dict[EngineRole[Any], object] = {
            ROLLOUT: self.rollouts,
            SCORER: pool("reward", "", scoring_engine(asks), config.scoring_deadline),
        }
        if self.opponents is not None:
            clients[OPPONENT] = self.opponents
        if config.episodes is not None:
            played = environment_engine(asks, config.episodes)
            clients[ENVIRONMENT] = pool(
                "environment", "-environment", played, config.rollout.deadline
            )
        for feature in features_of(config):
            clients |= feature.of_suite(asks, self.cluster, name)
        return Clients(clients)


class _Asks:
    """A caller with the suite's settings in place of its own."""

    def __init__(self, caller: Caller, suite: Suite) -> None:
        self.config = suite.config
        self.name, self.store, self.files = caller.name, caller.store, caller.files
        self.epoch, self.cancelled = caller.epoch, caller.cancelled
        self.attempts, self.tell = caller.attempts, caller.tell
        self.device_time = caller.device_time


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
    """A suite on a version, as the tasks that sample and score see it (tasks/run/contract.py)."""

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
        weights = self.engines[ROLLOUT].weights
        if weights.digest != self.weights.digest:
            raise WeightMismatch(
                f"The evaluation of version {self.number} found the engines at version "
                f"{weights.version}, {weights.digest}: an evaluation measures one version."
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

    def key_of(self, prompts: SuitePrompts) -> str:
        """Of version, questions, sampling and scoring code."""
        models = [model.model_dump(mode="json") for model in self.config.rewards.on_engines]
        return key_of(
            self.weights.digest,
            prompts.prompts.to_json(),
            self.suite.sampling.identity,
            self.config.rollout.engine,
            code_digest(prompts.code),
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
    results = {}
    for name, suite in evaluator.suites.items():
        run = Questioning(evaluator, suite, version, weights)
        try:
            results[name] = _evaluated(run)
        finally:
            run.shards.close()
            run.episodes.close()
        evaluator.keep(results[name])
        run.tell(VersionEvaluated(result=results[name], version=version))
        # Last: what is noted counts as told.
        note(run.caller.files, name, version, run.files.result_key(suite.summing))
    return results


def _evaluated(run: Questioning) -> EvaluationResult:
    """One suite: as it is in the store, or made now."""
    began = time.time()
    prompts = result_of(ask.submit(run))
    run.files = EvaluationFiles(run.store, run.key_of(prompts))
    result_key = run.files.result_key(run.suite.summing)
    result = find_result(run.store, result_key)
    if result is None or result.failed:  # a failure is no result: it is scored again
        count = -(-len(prompts.prompts) // run.suite.settings.rows_per_shard)
        evaluated = [
            evaluate_shards.submit(run, prompts, shards) for shards in run.shards.ranges(count)
        ]
        summed = summarize.submit(run, prompts, evaluated, began)  # type: ignore[arg-type]
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
            prompts = prompters(run.engines).call(
                PromptMaker.prompts,
                run.call_id(STEP_NUMBER, f"prompts-{suite.prompts_key}"),
                attempt.assignment,
                rows=rows,
                first_group=0,
                out_key=out_key,
                source=suite.settings.source,
            )
        if prompts.ref is None:
            raise ConfigError(
                f"The first {len(rows)} rows of {suite.source.name} give the suite {suite.name} no "
                f"prompt of at most {suite.config.data.max_prompt_tokens} tokens. Set its "
                "prompt.max_prompt_tokens higher."
            )
        dropped: dict[str, list[int]] = {}
        for row, reason in prompts.dropped:
            dropped.setdefault(reason, []).append(row)
        record = run.files.finish(out_key, {"ref": prompts.ref.to_json(), "dropped": dropped})
    with attempted(run, STEP_NUMBER, "reward code"):
        result = run.engines[SCORER].call(
            Scorer.reward_code, run.call_id(STEP_NUMBER, f"code-{suite.name}")
        )
    return SuitePrompts(
        prompts=BatchRef.from_json(record["ref"]),
        dropped={str(why): list(gone) for why, gone in dict(record["dropped"]).items()},  # type: ignore[call-overload]
        code=tuple(result.values()),
    )


@task(name="evaluate", task_run_name="evaluate {shards}", **OPTIONS)
def evaluate_shards(
    run: Questioning, prompts: SuitePrompts, shards: ShardRange
) -> list[EvaluatedShard]:
    """Answers to some shards of the questions, with their scores."""
    return run.shards.drive(
        STEP_NUMBER,
        "evaluate",
        shards,
        lambda shard: evaluated_shard(run, prompts.prompts.part(shard - 1, shards.of), shard),
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
            "code": [asdict(function) for function in result.code],
            "worker_seconds": {**run.attempts.worker_seconds(shard)},
        }
        if not result.failed:
            record = piece.finish(record)
    return of_record(record)


def of_record(record: Mapping[str, object]) -> EvaluatedShard:
    """A shard from its record."""
    metrics, code = record["metrics"], record["code"]
    worker_seconds = record.get("worker_seconds", {})  # an older Refrain counted none
    assert (
        isinstance(metrics, Mapping)
        and isinstance(code, list)
        and isinstance(worker_seconds, Mapping)
    )
    return EvaluatedShard(
        ref=BatchRef.from_json(record["ref"]),
        metrics={name: LoggedMetric(**metric) for name, metric in metrics.items()},
        code=tuple(code),
        worker_seconds=dict(worker_seconds),
    )


@task(name="sum up", task_run_name="sum up", **OPTIONS)
def summarize(
    run: Questioning, prompts: SuitePrompts, evaluated: list[list[EvaluatedShard]], began: float
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
        asked=len(prompts.prompts),
        dropped=prompts.dropped,
        samples=samples,
        prompts=prompts.prompts,
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
    prompt_seconds = run.attempts.worker_seconds(None)  # prompts
    return calls_cost(summed([*seconds, prompt_seconds]), pools_of(run.caller.config))


Results = dict[str, EvaluationResult]  # by suite


class Evaluations:
    """The evaluations of a run that has some."""

    def __init__(self, run: Run, config: EvaluationConfig) -> None:
        self._run, self._config = run, config
        self._aside = run.config.evaluates_aside
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._waiting: list[Future[Results]] = []
        self._done: dict[int, Results] = {}  # by version
        suites = {
            name: Suite.of(run.config, name, settings) for name, settings in config.suites.items()
        }
        self._evaluator = Evaluator(run, _place(run), suites, keep=self._keep)

    def begin(self) -> None:
        """Evaluate the version that the run begins with, if asked for, and what a dead flow left."""
        run = self._run
        if self._aside:
            noted = {(suite, version) for suite, version, _ in notes_of(run.files).values()}
            for version in sorted(run.to_be_evaluated()):
                if all((suite, version) in noted for suite in self._config.suites):
                    self._recall(version)
                elif version == run.head:
                    self._add(version, run.engines[ROLLOUT].weights)
                else:
                    self._add_if_there(version)
        elif self._config.due(run.head, run.start):
            self._add(run.head, run.engines[ROLLOUT].weights)

    def after(self, step: int) -> None:
        """A step is committed: evaluate the version that it made, if it is due.

        Raises what an evaluation beside the steps has failed of.
        """
        self._raise_failure()
        if self._config.due(step, self._run.start):
            self._add(step, version_weights(self._run.files, step))

    def end(self) -> Results | None:
        """Wait for those that are under way; the results of the last version, if it is evaluated."""
        head = self._run.head
        if self._config.at_end and head not in self._done:
            self._add(head, self._run.engines[ROLLOUT].weights)
        for future in self._waiting:
            future.result()
        return self._done.get(head)

    def close(self) -> None:
        """Begin no further one; what is under way ends with the engines."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _recall(self, version: int) -> None:
        """A dead flow has evaluated a version: what no commit has judged is judged with the next."""
        run = self._run
        run.evaluated.add(version)
        judged = any(feature.judge for feature in run.features)
        for result in evaluations_of(run.files, version=version) if judged else ():
            before = run.last is not None and result.made_at < run.last.committed_at
            if not before and not result.back_fill:
                run.measured |= evaluation_metrics(result)

    def _add_if_there(self, version: int) -> None:
        weights = version_weights(self._run.files, version)
        if self._run.store.exists(f"{weights.key}/{MANIFEST}"):
            self._add(version, weights)
        else:
            self._run.evaluated.add(version)  # an earlier retention has removed it

    def _add(self, version: int, weights: WeightsRef) -> None:
        if not self._aside:
            self._evaluate(version, weights)
            return
        here = contextvars.copy_context()  # the flow run that it is a part of
        self._waiting.append(self._thread.submit(here.run, self._evaluate, version, weights))

    def _evaluate(self, version: int, weights: WeightsRef) -> Results:
        if version in self._done:
            return self._done[version]
        if self._aside:
            self._run.engines[EVALUATION].use(weights)
        self._done[version] = evaluation(self._evaluator, version, weights)
        self._run.evaluated.add(version)
        return self._done[version]

    def _raise_failure(self) -> None:
        for future in self._waiting:
            if future.done() and not future.cancelled():
                future.result()
        self._waiting = [future for future in self._waiting if not future.done()]

    def _keep(self, result: EvaluationResult) -> None:
        self._run.measured |= evaluation_metrics(result)


def _place(run: Run) -> EvaluationPlace:
    """The engines of the run that evaluate."""
    engines, aside = run.engines, run.config.evaluates_aside
    return EvaluationPlace(
        cluster=engines.cluster,
        rollouts=engines[EVALUATION if aside else ROLLOUT],
        opponents=engines.get(OPPONENT),
        aside=aside,
        shared=None if aside else engines,
    )
