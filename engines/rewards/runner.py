"""Scores of completions by the reward functions of the settings, and what a failed score means.

Every function runs in a process of its own (RewardProcess). A sample that one of them could not score
is failed: it has no reward, not the reward 0. The built-in scorers are engines/rewards/builtin.py; a
user's function is called as TRL calls it.

A batch is scored such that only the samples at fault are failed. The whole batch is one call. When
that call raises or returns nonsense, the batch is halved, again and again, until the guilty samples
stand alone: calls are cheap. When it hangs or the process dies, samples are called one by one,
because each guilty call costs a process: first with an eighth of the deadline each, then those that
hung or crashed once more with the whole of it, so that a few hanging samples cannot use up the time
of the many good ones, and a process that was killed by somebody from outside is no sample's fault.

Where a call gave another number of values than it was given samples, and each part of it as many as
it should, no sample is at fault and the function is: a function that always returns one value would
else give it to every sample, once each stands alone. All samples of that call are failed.

All this has to fit into ISOLATION_BUDGET deadlines, counted in the time of calls; a lost process
counts as an eighth of a deadline at least, however quickly it crashed. A sample that could not be
reached by then is failed and says so. What a function logs counts where its call succeeds, so each
sample's logs count once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np

from configs.data import DataConfig
from configs.imports import is_file
from configs.rewards import (
    HOW_ASKED,
    CalledReward,
    ChoiceReward,
    EngineReward,
    EnvironmentReward,
    FunctionReward,
    JudgeReward,
    MathReward,
    ReasoningGymReward,
    Reward,
    RewardsConfig,
    SandboxConfig,
    UnitTestsReward,
)
from engines.meanings import meaning_of
from engines.processes.child_process import CallTimedOut, ChildProcess, ProcessDied, Program
from engines.rewards.judge import JudgeAnswers
from engines.rewards.protocol import (
    Prompt,
    Reply,
    RewardCall,
    RewardReady,
    RewardStart,
    TrainerState,
    unpacked,
)
from storage.objects.documents import JsonValue, Row, key_of
from storage.prompts.datasets import open_source
from storage.prompts.source import TASK, PromptSource

_GRACE = 15.0  # seconds after the deadline that a judge keeps by itself, before it is killed
_SAMPLE_SHARE = 1 / 6  # of a call's deadline: the longest time of one sample in a built-in scorer

NO_FUNCTION = "no reward function applies to this sample: each returned None"
ISOLATION_BUDGET = 4  # deadlines that finding the guilty samples of one batch may take
FIRST_LOOK = 1 / 8  # of the deadline: what a sample gets at first when samples are called singly
PROGRAM = Program(main="engines.rewards.child:main")


class RewardProcess(ChildProcess[RewardReady, RewardCall, Reply]):
    """A process that loads one function, and scores samples by it."""

    def __init__(self, start: RewardStart, start_seconds: float = 180.0) -> None:
        super().__init__(f"reward function {start.name}", PROGRAM, start, unpacked, start_seconds)
        self.name = start.name


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedMetric:
    """What was given to log_metric under one name: a mean over the samples of all calls.

    TRL takes the mean of all values that were given, which is the same where every call has as many
    samples and gives as many values. Here the mean of a call's values weighs as much as the call
    has samples, so that neither shards nor the search for a sample at fault change the figure.

    Example: 0.5 for a call of 6 samples and 1.0 for a call of 2 are total 5.0 of 8, mean 0.625.
    """

    total: float  # sum over the calls: mean of the call's values times its samples
    samples: int  # of those calls

    @classmethod
    def over(cls, values: Sequence[float]) -> LoggedMetric:
        """A value for each of some samples; at least one."""
        return cls(total=float(sum(values)), samples=len(values))

    @property
    def mean(self) -> float:
        """Mean over the samples."""
        return self.total / self.samples

    def __add__(self, other: LoggedMetric) -> LoggedMetric:
        return LoggedMetric(total=self.total + other.total, samples=self.samples + other.samples)


def pooled(logged: Iterable[Mapping[str, LoggedMetric]]) -> dict[str, LoggedMetric]:
    """The metrics of several functions, or shards, together."""
    pool: dict[str, LoggedMetric] = {}
    for metrics in logged:
        for name, metric in metrics.items():
            pool[name] = pool[name] + metric if name in pool else metric
    return pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One function's view of a batch of N samples. Filled while the batch is scored."""

    values: np.ndarray  # float64 [N]; 0 where there is no value
    applied: np.ndarray  # bool [N]; where the function gave a value
    errors: dict[int, str] = field(default_factory=dict)  # sample without a valid value, and why
    metrics: dict[str, LoggedMetric] = field(default_factory=dict)  # given to log_metric, by name
    extras: dict[str, list[JsonValue]] = field(default_factory=dict)  # given to log_extra, N each
    tracebacks: dict[str, str] = field(default_factory=dict)  # of errors, by the error


def score_column(process: RewardProcess, batch: RewardCall, seconds: float) -> Column:
    """Score all samples of a batch by one function.

    Args:
        process: of the function.
        batch: N samples.
        seconds: deadline of a call.

    RuntimeError when the function's process cannot be started again: no sample is to blame.
    """
    size = len(batch.completions)
    column = Column(values=np.zeros(size), applied=np.zeros(size, dtype=bool))
    if size:
        _Scoring(process, batch, seconds, column).run()
    return column


def score_those(
    process: RewardProcess, batch: RewardCall, seconds: float, places: Sequence[int]
) -> Column:
    """`score_column` of the samples at some places; the function does not apply to the others."""
    size, some = len(batch.completions), score_column(process, _part(batch, places), seconds)
    column = Column(
        values=np.zeros(size),
        applied=np.zeros(size, dtype=bool),
        errors={places[at]: error for at, error in some.errors.items()},
        metrics=some.metrics,
        tracebacks=some.tracebacks,
    )
    column.values[list(places)], column.applied[list(places)] = some.values, some.applied
    for name, entries in some.extras.items():
        column.extras[name] = [None] * size
        for place, entry in zip(places, entries, strict=True):
            column.extras[name][place] = entry
    return column


def only_at(column: Column, places: Sequence[int]) -> Column:
    """A function's view of a batch, which does not apply but at some places."""
    there = np.zeros(len(column.values), dtype=bool)
    there[list(places)] = True
    return replace(
        column,
        values=np.where(there, column.values, 0.0),
        applied=column.applied & there,
        errors={place: error for place, error in column.errors.items() if there[place]},
    )


@dataclass(frozen=True, slots=True)
class _Fault:
    error: str
    costly: bool  # the process was lost: the call hung or crashed
    miscounted: bool = False  # the call gave another number of values than samples


class _Scoring:
    def __init__(
        self, process: RewardProcess, batch: RewardCall, seconds: float, column: Column
    ) -> None:
        self._process = process
        self._batch = batch
        self._seconds = seconds
        self._column = column
        self._budget = seconds  # seconds of calls that are left

    def run(self) -> None:
        everything = range(len(self._batch.completions))
        fault = self._attempt(everything, self._seconds)
        if fault is not None:
            self._budget = ISOLATION_BUDGET * self._seconds
            self._isolate(everything, fault)

    def _isolate(self, samples: Sequence[int], fault: _Fault) -> None:
        pending = deque([(samples, fault)])
        miscounted: list[tuple[Sequence[int], _Fault]] = []
        while pending:
            samples, fault = pending.popleft()
            if fault.miscounted:
                miscounted.append((samples, fault))
            if len(samples) == 1:
                self._column.errors[samples[0]] = fault.error
            elif fault.costly:
                self._one_by_one(samples)
            else:
                middle = len(samples) // 2
                for half in (samples[:middle], samples[middle:]):
                    half_fault = self._attempt(half, self._seconds)
                    if half_fault is not None:
                        pending.append((half, half_fault))
        guilty = set(self._column.errors)
        for samples, fault in miscounted:  # of the smallest such call its own count is told
            if guilty.isdisjoint(samples):
                for sample in samples:
                    self._column.errors[sample] = fault.error
                    self._column.values[sample], self._column.applied[sample] = 0, False

    def _one_by_one(self, samples: Sequence[int]) -> None:
        for allowed in (self._seconds * FIRST_LOOK, self._seconds):
            again = []
            for sample in samples:
                fault = self._attempt([sample], allowed)
                if fault is not None:
                    self._column.errors[sample] = fault.error
                    if fault.costly:  # too slow, or killed by somebody from outside
                        again.append(sample)
            samples = again

    def _attempt(self, samples: Sequence[int], seconds: float) -> _Fault | None:
        """One call; its result goes into the column, or its fault is returned."""
        if self._budget <= 0:
            limit = ISOLATION_BUDGET * self._seconds
            for sample in samples:
                self._column.errors.setdefault(
                    sample, f"not scored: finding the samples at fault took more than {limit:g} s"
                )
            return None
        self._process.start()  # starting anew after a loss is not the samples' time
        started, least = time.monotonic(), 0.0
        try:
            reply = self._process.call(_part(self._batch, samples), min(seconds, self._budget))
        except (CallTimedOut, ProcessDied) as error:
            least = self._seconds * FIRST_LOOK
            if error.stacks:
                self._column.tracebacks[str(error)] = error.stacks
            return _Fault(str(error), costly=True)
        finally:
            self._budget -= max(time.monotonic() - started, least)
        self._column.tracebacks.update(reply.tracebacks)
        if reply.error is not None:
            return _Fault(reply.error, costly=False, miscounted=reply.miscounted)
        self._record(samples, reply)
        return None

    def _record(self, samples: Sequence[int], reply: Reply) -> None:
        column = self._column
        for position, sample in enumerate(samples):
            column.errors.pop(sample, None)
            value = reply.values[position]
            if position in reply.errors:
                column.errors[sample] = reply.errors[position]
            elif value is not None:
                column.values[sample], column.applied[sample] = value, True
        size = len(samples)
        logged = {n: LoggedMetric(total=m * size, samples=size) for n, m in reply.metrics.items()}
        column.metrics.update(pooled([column.metrics, logged]))
        for name, entries in reply.extras.items():
            whole = column.extras.setdefault(name, [None] * len(column.values))
            for sample, entry in zip(samples, entries, strict=True):
                whole[sample] = entry


def _part(batch: RewardCall, samples: Sequence[int]) -> RewardCall:
    return RewardCall(
        prompts=[batch.prompts[i] for i in samples],
        completions=[batch.completions[i] for i in samples],
        completion_ids=[batch.completion_ids[i] for i in samples],
        rows=[batch.rows[i] for i in samples],
        global_step=batch.global_step,
        max_steps=batch.max_steps,
        epoch=batch.epoch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """Why a sample has no reward."""

    index: int  # position of the sample in the batch
    function: str  # name of the reward function
    error: str  # one line


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Rewards of N samples by F functions. Where `failed` is set a reward means nothing."""

    names: tuple[str, ...]  # of the functions, [F]
    rewards: np.ndarray  # float32 [N]: weighted sum over the functions that apply; 0 where failed
    failed: np.ndarray  # bool [N]
    components: np.ndarray  # float32 [N, F]: unweighted scores; 0 where `applied` is not set
    applied: np.ndarray  # bool [N, F]: where a function gave a score
    failures: tuple[RewardFailure, ...]  # at least one for each failed sample
    metrics: dict[str, LoggedMetric]  # what the functions gave to log_metric, by its name
    extras: dict[str, list[JsonValue]]  # [N] each: given to log_extra, as function/column
    seconds: dict[str, float]  # time that each function took
    tracebacks: dict[str, str]  # of the errors among the failures, by the error

    def means(self) -> dict[str, float]:
        """Mean score of each function over the samples that it scored; absent where none."""
        return {
            name: float(self.components[self.applied[:, f], f].mean())
            for f, name in enumerate(self.names)
            if self.applied[:, f].any()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCode:
    """A reward function as it was loaded: enough to tell whether another is the same."""

    name: str
    # Of the recipe: kind, import path, weight, params; and `meaning`, its version from the second on.
    settings: dict[str, Any]
    source: str  # sha256 of the function's own lines; empty where they cannot be read
    module: str  # sha256 of its file
    packages: dict[str, str]  # versions, of its own package and of libraries that judge


def code_digest(code: Sequence[RewardCode]) -> str:
    """Names all functions of a run together: 16 hex digits."""
    return key_of([asdict(function) for function in code])


class RewardRunner:
    """The reward functions of one run, each in its process. Close it, or use it as a context."""

    def __init__(
        self,
        rewards: RewardsConfig,
        data: DataConfig,
        answers: JudgeAnswers | None = None,
        sharers: int = 1,
    ) -> None:
        """
        Args:
            rewards: the functions.
            data: the data set.
            answers: where judges' answers are kept; None: nowhere.
            sharers: runners of the run that share what a judge's endpoint allows.
        """
        self._rewards, self._data = rewards, data
        self._called = [
            function for function in rewards.functions if not isinstance(function, EngineReward)
        ]
        self._processes = [
            RewardProcess(_start_message(reward, rewards, data, answers, sharers))
            for reward in self._called
        ]
        self._threads = ThreadPoolExecutor(max(1, len(self._called)), thread_name_prefix="reward")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions, in the order of the settings."""
        return tuple(reward.label for reward in self._rewards.functions)

    def start(self) -> tuple[tuple[str, ...], ...]:
        """Load every function now, all at once: some take seconds. Done by `score` otherwise.

        For each function that is no reward model, the columns that it cannot be called without.
        ValueError when one cannot be loaded, RuntimeError when its process fails.
        """
        ready = self._threads.map(RewardProcess.start, self._processes)
        return tuple(answer.columns for answer in ready)

    def code(self, models: Sequence[RewardCode] = ()) -> tuple[RewardCode, ...]:
        """What the functions are, as they are loaded now; models: what the reward models are."""
        functions = {function.name: function for function in models} | self.called_code()
        return tuple(functions[name] for name in self.names)

    def called_code(self) -> dict[str, RewardCode]:
        """The same of those that are called, by name: of all but reward models and local judges."""
        return {
            reward.label: RewardCode(
                name=reward.label,
                settings=_definition(reward, self._data),
                source=ready.source,
                module=ready.module,
                packages=dict(ready.packages),
            )
            for reward, ready in zip(
                self._called,
                self._threads.map(RewardProcess.start, self._processes),
                strict=True,
            )
        }

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        rows: Sequence[Row],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState | None = None,
        given: Mapping[str, Column] | None = None,
        source: Callable[[], PromptSource] | None = None,
    ) -> Scores:
        """Score N samples; each of the lists has one entry per sample.

        Args:
            prompts: text or chat messages, [N] as the next three.
            completions: decoded text.
            rows: of the data set.
            completion_ids: tokens of the completions; empty if not given.
            trainer_state: where the run stands; at its beginning if not given.
            given: what the reward models gave, by function.
            source: opens what the rows are of; the data set if not given. Where a row lacks a column
                that a function cannot be called without, and another has it, the function gets None.

        Failures of samples are part of the result. RuntimeError only when a function's process
        cannot be started, ValueError when a function cannot be loaded.
        """
        state = trainer_state or TrainerState()
        rows = self._filled(rows, source or (lambda: open_source(self._data.source)))
        batch = RewardCall(
            prompts=prompts,
            completions=completions,
            completion_ids=completion_ids or [()] * len(completions),
            rows=rows,
            global_step=state.global_step,
            max_steps=state.max_steps,
            epoch=state.epoch,
        )
        lengths = {len(batch.prompts), len(batch.completions), len(batch.completion_ids), len(rows)}
        assert len(lengths) == 1, f"arguments of different lengths: {lengths}"

        def timed(process: RewardProcess, reward: Reward) -> tuple[Column, float]:
            started = time.perf_counter()
            others = self._data.sandboxes(reward.label).values()
            seconds = deadline(reward, self._rewards.timeout, len(batch.completions), others)
            if (places := self._scored(reward.label, rows)) is None:
                column = score_column(process, batch, seconds)
            else:
                column = score_those(process, batch, seconds, places)
            return column, time.perf_counter() - started

        results = self._threads.map(timed, self._processes, self._called)
        scored = {}
        for name, column in (given or {}).items():
            places = self._scored(name, rows)
            scored[name] = (column if places is None else only_at(column, places), 0.0)
        scored |= {
            function.label: result for function, result in zip(self._called, results, strict=True)
        }
        ordered = [scored[name] for name in self.names]
        columns, seconds = [column for column, _ in ordered], [took for _, took in ordered]
        return self._gather(columns, seconds, len(batch.completions))

    def _scored(self, name: str, rows: Sequence[Row]) -> list[int] | None:
        """Places of the rows that a function scores, where there are several tasks; None: all."""
        if not (tasks := self._data.tasks):
            return None
        names_by_task = {task: self._data.rewards_of(task) for task in tasks}
        scored = {task for task, names in names_by_task.items() if names is None or name in names}
        return [place for place, row in enumerate(rows) if row[TASK] in scored]

    def _filled(self, rows: Sequence[Row], source: Callable[[], PromptSource]) -> Sequence[Row]:
        """The rows, with None in needed columns that one of them lacks and another of theirs has."""
        needed = {column for columns in self.start() for column in columns}
        lacking = sorted(column for column in needed if not all(column in row for row in rows))
        nothing = {
            column: None
            for column in lacking
            if any(column in row for row in rows) or source().has_column(column)
        }
        return [{**nothing, **row} for row in rows] if nothing else rows

    def _gather(self, columns: list[Column], seconds: list[float], samples: int) -> Scores:
        names = self.names
        nothing = np.zeros((samples, 0))  # where there are no functions, whose sum is 0
        values = np.column_stack([nothing, *(column.values for column in columns)])
        applied = np.column_stack([nothing.astype(bool), *(c.applied for c in columns)])
        weights = np.array([reward.weight for reward in self._rewards.functions])
        with np.errstate(over="ignore"):
            rewards = (values * weights).sum(axis=1).astype(np.float32)
        failures = _failures(names, columns, applied, rewards)
        failed = np.zeros(len(values), dtype=bool)
        for failure in failures:
            failed[failure.index] = True
        rewards[failed] = 0.0
        return Scores(
            names=names,
            rewards=rewards,
            failed=failed,
            components=values.astype(np.float32),
            applied=applied,
            failures=failures,
            metrics=pooled(column.metrics for column in columns),
            extras={
                f"{name}/{logged}": values
                for name, column in zip(names, columns, strict=True)
                for logged, values in column.extras.items()
            },
            seconds=dict(zip(names, seconds, strict=True)),
            tracebacks={
                failure.error: column.tracebacks[failure.error]
                for column in columns
                for failure in failures
                if failure.error in column.tracebacks
            },
        )

    def close(self) -> None:
        """Kill the functions' processes; a `score` under way fails."""
        for process in self._processes:
            process.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _definition(reward: Reward, data: DataConfig) -> dict[str, Any]:
    """The settings that a score depends on."""
    left_out = set(HOW_ASKED) if isinstance(reward, JudgeReward) else set()
    settings = reward.model_dump(mode="json", exclude=left_out)
    if isinstance(reward, UnitTestsReward) and (sandboxes := data.sandboxes(reward.label)):
        settings["sandboxes"] = {
            task: sandbox.model_dump(mode="json") for task, sandbox in sandboxes.items()
        }
    meaning = meaning_of(reward)
    return settings if meaning == 1 else settings | {"meaning": meaning}


def deadline(
    reward: Reward, timeout: float, samples: int, sandboxes: Iterable[SandboxConfig] = ()
) -> float:
    """Seconds that a call for so many samples may take, after which its process is killed.

    sandboxes: of unit tests, those of tasks that have one of their own.
    A program that hangs in its sandbox is a result, so there is time for every sample to do that.
    """
    if isinstance(reward, JudgeReward):
        return reward.deadline + _GRACE
    if not isinstance(reward, UnitTestsReward):
        return timeout
    return timeout + reward.seconds(samples, sandboxes)


def _start_message(
    reward: CalledReward,
    rewards: RewardsConfig,
    data: DataConfig,
    answers: JudgeAnswers | None,
    sharers: int,
) -> RewardStart:
    params: dict[str, Any]
    packages: tuple[str, ...]
    match reward:
        case FunctionReward():
            path, params = reward.path, dict(reward.params)
            place = path.rpartition(":")[0]
            packages = () if is_file(place) else (place.partition(".")[0],)
        case MathReward():
            path, params = "engines.rewards.builtin:math_scorer", {"reward": reward}
            packages = ("refrain-rl", "math-verify")
        case ChoiceReward():
            path, params = "engines.rewards.builtin:choice_scorer", {"reward": reward}
            packages = ("refrain-rl",)
        case EnvironmentReward():
            path, params = "engines.rewards.builtin:environment_scorer", {"reward": reward}
            packages = ("refrain-rl",)
        case JudgeReward():
            path = "engines.rewards.judge:judge_scorer"
            params = {"reward": reward, "answers": answers, "sharers": sharers}
            packages = ("refrain-rl", "httpx")
        case UnitTestsReward():
            path = "engines.rewards.unit_tests:unit_test_scorer"
            params = {"reward": reward, "sandboxes": data.sandboxes(reward.label)}
            packages = ("refrain-rl",)
        case ReasoningGymReward():
            path = "engines.rewards.builtin:reasoning_gym_scorer"
            packages = ("refrain-rl", "reasoning-gym")
            params = {"reward": reward, "source": data.scored_by(reward.label)[0].source}
    return RewardStart(
        name=reward.path if isinstance(reward, FunctionReward) else reward.label,
        path=path,
        built_in=not isinstance(reward, FunctionReward),
        params=params,
        sample_seconds=rewards.timeout * _SAMPLE_SHARE,
        at_once=reward.at_once if isinstance(reward, UnitTestsReward) else None,
        packages=packages,
    )


def _failures(
    names: Sequence[str], columns: Sequence[Column], applied: np.ndarray, rewards: np.ndarray
) -> tuple[RewardFailure, ...]:
    """Why samples have no reward, in their order; `applied` is [N, F], `rewards` [N]."""
    failures = [
        RewardFailure(index=index, function=name, error=error)
        for name, column in zip(names, columns, strict=True)
        for index, error in column.errors.items()
    ]
    blamed = {failure.index for failure in failures}
    for unusable, error in (
        (~applied.any(axis=1) & bool(names), NO_FUNCTION),
        (~np.isfinite(rewards), "the weighted sum of its scores is not a finite float32"),
    ):
        for index in np.flatnonzero(unusable).tolist():
            if index not in blamed:
                everyone = ", ".join(names)
                failures.append(RewardFailure(index=index, function=everyone, error=error))
    return tuple(sorted(failures, key=lambda failure: failure.index))
