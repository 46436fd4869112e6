"""Scoring a batch by one function such that only the samples at fault are failed.

The whole batch is one call. When that call raises or returns nonsense, the batch is halved, again
and again, until the guilty samples stand alone: calls are cheap. When it hangs or the process dies,
samples are called one by one, because each guilty call costs a process: first with an eighth of
the deadline each, then those that hung or crashed once more with the whole of it, so that a few
hanging samples cannot use up the time of the many good ones, and a process that was killed by
somebody from outside is no sample's fault.

Where a call gave another number of values than it was given samples, and each part of it as many as
it should, no sample is at fault and the function is: a function that always returns one value would
else give it to every sample, once each stands alone. All samples of that call are failed.

All this has to fit into ISOLATION_BUDGET deadlines, counted in the time of calls; a lost process
counts as an eighth of a deadline at least, however quickly it crashed. A sample that could not be
reached by then is failed and says so.

What a function logs counts where its call succeeds, so each sample's logs count once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engines.processes.child_process import CallTimedOut, ProcessDied
from engines.rewards.process import RewardProcess
from engines.rewards.protocol import Reply, RewardCall
from storage.objects.documents import JsonValue

ISOLATION_BUDGET = 4  # deadlines that finding the guilty samples of one batch may take
FIRST_LOOK = 1 / 8  # of the deadline: what a sample gets at first when samples are called singly


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
    found: dict[str, LoggedMetric] = {}
    for metrics in logged:
        for name, metric in metrics.items():
            found[name] = found[name] + metric if name in found else metric
    return found


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
