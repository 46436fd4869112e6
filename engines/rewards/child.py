"""What runs in a reward process: one function, and calls answered one at a time.

It scores in the main thread, where signal alarms work. The owner (engines/rewards/runner.py) kills
the process when a call takes too long, so nothing here needs to survive. A process is started anew
for each sample that hangs: only the standard library is imported here. A function that is named by
its file finds the modules of its own folder first, whatever their names.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from configs.imports import described, imported, is_file
from engines.processes.user_code import (
    Broken,
    answer_calls,
    begin,
    give_way,
    installed,
    packed,
    shortened,
    source_digests,
    traceback_of,
)
from engines.rewards import protocol
from engines.rewards.protocol import (
    TRL_ARGUMENTS,
    TRL_HIDDEN_COLUMNS,
    BatchScorer,
    Reply,
    RewardCall,
    RewardReady,
    RewardStart,
    SampleScore,
    SampleTookTooLong,
    TrainerState,
    Unscored,
    unpacked,
)

if TYPE_CHECKING:
    from engines.rewards.builtin import Scorer
    from storage.objects.documents import JsonValue, Row

_ERROR_CHARACTERS = 500  # of an error's text that are kept


def main(socket: int, owner: int, dump: int) -> None:
    """Load the function named by the first message, then answer calls until the owner is gone.

    `dump`: file descriptor that gets the stacks at a crash in native code, and at SIGUSR1.
    """
    begin(owner, dump, "refrain reward")
    with Connection(socket) as connection:
        start: RewardStart = connection.recv()
        try:
            answer, ready = _load(start)
        except Exception as error:
            connection.send(packed(Broken(error=_refusal(start, error))))
            return
        connection.send(packed(ready))

        def answered(message: Any) -> object:
            call = unpacked(message)
            assert isinstance(call, RewardCall)
            return packed(answer(call))

        answer_calls(connection, answered)


def _load(start: RewardStart) -> tuple[Callable[[RewardCall], Reply], RewardReady]:
    place = start.path.rpartition(":")[0]
    if not start.built_in and is_file(place):
        give_way(place)
    function = imported(start.path)
    if not callable(function):
        raise ValueError(f"{start.path} is a {type(function).__name__}, not a function")
    if start.built_in:
        scorer = function(**start.params)
        if isinstance(scorer, BatchScorer):
            ready = ready_of(function, scorer.columns, start.packages)
            return WholeScorer(scorer), replace(ready, source=scorer.source or ready.source)
        by_sample = SampleScorer(scorer, start.sample_seconds, start.at_once)
        return by_sample, ready_of(function, (), start.packages)
    columns = required_columns(function, start.params)
    return FunctionScorer(function, start.params), ready_of(function, columns, start.packages)


def ready_of(
    function: Callable[..., Any], columns: tuple[str, ...], packages: tuple[str, ...]
) -> RewardReady:
    """With digests of the lines that were loaded, and versions of packages that are installed."""
    source, module = source_digests(function)
    return RewardReady(columns=columns, source=source, module=module, packages=installed(packages))


def _refusal(start: RewardStart, error: Exception) -> str:
    reason = str(error) if isinstance(error, ValueError) else _describe(error)
    if start.built_in and isinstance(error, ValueError):  # a sentence about the user's settings
        return reason
    return f"The reward function {start.name} cannot be loaded: {reason}."


def required_columns(function: Callable[..., Any], params: Mapping[str, object]) -> tuple[str, ...]:
    """Names that the function has to be given by the data set."""
    arguments = {*TRL_ARGUMENTS, *params}
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in arguments
    )


class FunctionScorer:
    """Calls a user's function as TRL's GRPOTrainer does, once for a whole batch.

    A function without **kwargs is given only what it names; with it, everything.
    """

    def __init__(self, function: Callable[..., Any], params: Mapping[str, object]) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._function = function
        self._params = params
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters}
        self._loop = asyncio.Runner()  # one for the life of the process: sessions stay usable

    def __call__(self, call: RewardCall) -> Reply:
        logged = Logged()
        try:
            result = self._function(**self._arguments(call, logged))
            if inspect.isawaitable(result):
                result = self._loop.run(_finish(result))
            values = [] if result is None else list(result)
        except Exception as error:
            return _failed_call(_describe(error), traceback_of(error, (os.path.abspath(__file__),)))
        size = len(call.completions)
        if result is None or len(values) != size:
            returned = "None" if result is None else f"{len(values)} values"
            return _failed_call(
                f"returned {returned} for {size} sample{'s' * (size > 1)}", miscounted=True
            )
        return _answered([_checked(value) for value in values], logged)

    def _arguments(self, call: RewardCall, logged: Logged) -> dict[str, Any]:
        names = dict.fromkeys(name for row in call.rows for name in row)
        columns = [name for name in names if name not in TRL_HIDDEN_COLUMNS]
        arguments = {
            # None where a row lacks a column.
            **{name: [row.get(name) for row in call.rows] for name in columns},
            "prompts": list(call.prompts),
            # Text for a prompt that is text, a list with one message for a prompt of messages.
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(call.prompts, call.completions, strict=True)
            ],
            "completion_ids": [list(ids) for ids in call.completion_ids],
            "trainer_state": TrainerState(
                global_step=call.global_step, max_steps=call.max_steps, epoch=call.epoch
            ),
            "log_extra": logged.log_extra,
            "log_metric": logged.log_metric,
            **self._params,
        }
        if self._takes_all:
            return arguments
        return {name: arguments[name] for name in self._names if name in arguments}


class Logged:
    """What a function logs during one call, by TRL's two functions.

    A wrong value is an error in the function, at the line that logs it.
    """

    def __init__(self) -> None:
        self.extras: dict[str, list[JsonValue]] = {}  # one entry per sample, at the call's end
        self._metrics: dict[str, list[float]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number for the batch, or several one by one, of which the mean is taken."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"log_metric({name!r}, …): a metric's name is a string")
        number = _number(value)
        if number is None:
            shown = shortened(repr(value), 60)
            raise TypeError(f"log_metric({name!r}, …): {shown} is not a number")
        values = self._metrics.setdefault(name, [])
        if math.isfinite(number):
            values.append(number)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Log values of a column, one per sample: all at once, or in parts."""
        if not isinstance(column, str) or not column:
            raise TypeError(f"log_extra({column!r}, …): a column's name is a string")
        if isinstance(values, (str, bytes)):
            raise TypeError(f"log_extra({column!r}, …): the values are a string, not a list")
        self.extras.setdefault(column, []).extend(_json_value(value) for value in values)

    def means(self) -> dict[str, float]:
        """Name -> mean of the finite values; absent where there is none (TRL leaves out NaN)."""
        return {name: math.fsum(v) / len(v) for name, v in self._metrics.items() if v}


class WholeScorer:
    """Calls a built-in scorer once for a whole batch."""

    def __init__(self, scorer: BatchScorer) -> None:
        self._scorer = scorer

    def __call__(self, call: RewardCall) -> Reply:
        logged = Logged()
        try:
            values = self._scorer(call, logged)
        except Exception as error:
            return _failed_call(_describe(error), traceback_of(error, (os.path.abspath(__file__),)))
        assert len(values) == len(call.completions)
        return _answered(
            [value.reason if isinstance(value, Unscored) else _checked(value) for value in values],
            logged,
        )


class SampleScorer:
    """Calls a built-in scorer sample by sample, so that one sample's error is its own."""

    def __init__(self, scorer: Scorer, seconds: float, at_once: int | None = None) -> None:
        self._scorer = scorer
        self._seconds = seconds
        self._threads = None if at_once is None else ThreadPoolExecutor(at_once)

    def __call__(self, call: RewardCall) -> Reply:
        samples = (call.completions, call.rows)
        if self._threads is None:
            results = [self._timed(text, row) for text, row in zip(*samples, strict=True)]
        else:
            results = list(self._threads.map(self._scored, *samples))
        columns = dict.fromkeys(name for result in results for name in result.extras)
        return Reply(
            values=[result.value for result in results],
            errors={
                i: result.error for i, result in enumerate(results) if result.error is not None
            },
            error=None,
            metrics={},
            extras={name: [result.extras.get(name) for result in results] for name in columns},
            tracebacks={
                result.error: result.trace for result in results if result.error and result.trace
            },
        )

    def _timed(self, text: str, row: Row) -> _Sample:
        try:
            with _alarm(self._seconds):
                return self._scored(text, row)
        except SampleTookTooLong:
            return _Sample(error=f"took longer than {self._seconds:g} s")

    def _scored(self, text: str, row: Row) -> _Sample:
        try:
            result = self._scorer(text, row)
        except Exception as error:
            trace = traceback_of(error, (os.path.abspath(__file__),))
            return _Sample(error=_describe(error), trace=trace)
        if not isinstance(result, SampleScore):
            result = SampleScore(score=result, extras={})
        value = _checked(result.score)
        if isinstance(value, str):
            return _Sample(error=value, extras=result.extras)
        return _Sample(value=value, extras=result.extras)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    value: float | None = None
    error: str | None = None  # why there is no valid value
    trace: str = ""  # of the exception, if it was one
    extras: Mapping[str, JsonValue] = field(default_factory=dict)


async def _finish(result: Awaitable[Any]) -> Any:
    return await result


def _checked(value: Any) -> float | str | None:
    """A number that fits float32, None for "not applicable", or the reason why it is neither."""
    if value is None:
        return None
    number = _number(value)
    if number is None:
        return f"returned {shortened(repr(value), 60)}, which is not a number"
    if not math.isfinite(number) or abs(number) > 3e38:
        return f"returned {number}, which is not a finite float32"
    return number


def _number(value: Any) -> float | None:
    """Any kind of number, such as a tensor of one element; None for what is none, as text."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _answered(checked: Sequence[float | str | None], logged: Logged) -> Reply:
    """The reply of a call that gave for each sample a number, None, or why it has none."""
    size = len(checked)
    for column, entries in logged.extras.items():
        if len(entries) != size:
            return _failed_call(
                f"gave log_extra {len(entries)} values of {column!r} for {size} samples",
                miscounted=True,
            )
    return Reply(
        values=[value if isinstance(value, float) else None for value in checked],
        errors={i: value for i, value in enumerate(checked) if isinstance(value, str)},
        error=None,
        metrics=logged.means(),
        extras=logged.extras,
        tracebacks={},
    )


def _failed_call(error: str, trace: str = "", miscounted: bool = False) -> Reply:
    return Reply(
        values=(), errors={}, error=error, metrics={}, extras={}, miscounted=miscounted,
        tracebacks={error: trace} if trace else {},
    )  # fmt: skip


def _json_value(value: Any) -> JsonValue:
    """A value as JSON has it; a number that is not finite becomes null, another object its text.

    Half of a surrogate pair, which can neither be printed nor written, becomes U+FFFD.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(_json_value(str(key))): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    return _json_value(str(value))


def _describe(error: Exception) -> str:
    """The error's type and text, and the function's line that raised it."""
    return described(error, _ERROR_CHARACTERS, ours=(__file__, protocol.__file__))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise SampleTookTooLong in the main thread when the block runs longer."""

    def ring(signum: int, frame: object) -> None:
        raise SampleTookTooLong

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
