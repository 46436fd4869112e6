"""What runs in a reward process: one function, and calls answered one at a time.

It scores in the main thread, where signal alarms work. The owner (engines/rewards/process.py) kills
the process when a call takes too long, so nothing here needs to survive. A process is started anew
for each sample that hangs: only the standard library is imported here.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import hashlib
import inspect
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.rewards.protocol import (
    TRL_ARGUMENTS,
    TRL_HIDDEN_COLUMNS,
    Broken,
    Code,
    Ready,
    Reply,
    RewardCall,
    Start,
)

if TYPE_CHECKING:
    from engines.rewards.builtin import Scorer

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ERROR_CHARACTERS = 500  # of an error's text that are kept
_TRACE_CHARACTERS = 8000  # of a traceback; its end tells most


class SampleTookTooLong(BaseException):
    """Raised by the alarm; no Exception, so that a scorer's own handlers let it pass."""


def main(socket: int, owner: int, dump: int) -> None:
    """Load the function named by the first message, then answer calls until the owner is gone.

    `dump`: file descriptor that gets the stacks at a crash in native code, and at SIGUSR1.
    """
    _die_with(owner)
    faulthandler.enable(dump)
    faulthandler.register(signal.SIGUSR1, dump)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Connection(socket) as connection:
        start: Start = connection.recv()
        try:
            answer, ready = _load(start)
        except Exception as error:
            connection.send(Broken(error=_refusal(start, error)))
            return
        connection.send(ready)
        while True:
            try:
                call: RewardCall = connection.recv()
            except EOFError:
                return
            connection.send(answer(call))


def _die_with(owner: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(1)


def _load(start: Start) -> tuple[Callable[[RewardCall], Reply], Ready]:
    function = find_function(start.path)
    code = code_of(function, start.packages)
    if start.built_in:
        scorer = SampleScorer(function(**start.params), start.sample_seconds)
        return scorer, Ready(columns=(), code=code)
    columns = required_columns(function, start.params)
    return FunctionScorer(function, start.params), Ready(columns=columns, code=code)


def code_of(function: Callable[..., Any], packages: tuple[str, ...]) -> Code:
    """Digests of the lines that were loaded, and versions of packages where they are installed."""
    plain = inspect.unwrap(function)
    plain = plain if inspect.isroutine(plain) or inspect.isclass(plain) else type(plain)
    try:
        source = _sha256(inspect.getsource(plain).encode())
    except (OSError, TypeError):  # made at run time, or not in Python
        source = ""
    try:
        module = _sha256(Path(inspect.getfile(plain)).read_bytes())
    except (OSError, TypeError):
        module = ""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return Code(source=source, module=module, packages=found)


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _refusal(start: Start, error: Exception) -> str:
    if start.built_in and isinstance(error, ValueError):  # a sentence about the user's settings
        return str(error)
    return f"The reward function {start.name} cannot be loaded: {_describe(error)}."


def find_function(path: str) -> Callable[..., Any]:
    """The callable at package.module:name; ImportError or AttributeError when there is none."""
    module, _, name = path.partition(":")
    function = attrgetter(name)(import_module(module))
    if not callable(function):
        raise TypeError(f"{path} is a {type(function).__name__}, not a function")
    return function


def required_columns(function: Callable[..., Any], params: Mapping[str, object]) -> tuple[str, ...]:
    """Names that the function has to be given by the data set."""
    given = {*TRL_ARGUMENTS, *params}
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in given
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
        metrics: dict[str, list[float]] = {}
        extras: dict[str, list[Any]] = {}

        def log_metric(name: str, value: float) -> None:
            metrics.setdefault(name, []).append(float(value))

        def log_extra(column: str, values: list[Any]) -> None:
            extras[column] = [_printable(value) for value in values]

        arguments = {
            **_columns(call),
            "prompts": list(call.prompts),
            "completions": _completions(call),
            "completion_ids": [list(ids) for ids in call.completion_ids],
            "trainer_state": call.trainer_state,
            "log_extra": log_extra,
            "log_metric": log_metric,
            **self._params,
        }
        if not self._takes_all:
            arguments = {name: arguments[name] for name in self._names if name in arguments}
        try:
            result = self._function(**arguments)
            if inspect.isawaitable(result):
                result = self._loop.run(_finish(result))
            values = [] if result is None else list(result)
        except Exception as error:
            return _failed_call(_describe(error), _trace(error))
        if result is None or len(values) != len(call.completions):
            got = "None" if result is None else f"{len(values)} values"
            return _failed_call(f"returned {got} for {len(call.completions)} samples")
        checked = [_checked(value) for value in values]
        return Reply(
            values=[value if isinstance(value, float) else None for value in checked],
            errors={i: value for i, value in enumerate(checked) if isinstance(value, str)},
            error=None,
            metrics=metrics,
            extras={c: v for c, v in extras.items() if len(v) == len(values)},
            tracebacks={},
        )


class SampleScorer:
    """Calls a built-in scorer sample by sample, so that one sample's error is its own."""

    def __init__(self, scorer: Scorer, seconds: float) -> None:
        self._scorer = scorer
        self._seconds = seconds

    def __call__(self, call: RewardCall) -> Reply:
        values: list[float | None] = []
        errors: dict[int, str] = {}
        tracebacks: dict[str, str] = {}
        for position, (text, row) in enumerate(zip(call.completions, call.rows, strict=True)):
            value: float | str | None
            try:
                with _alarm(self._seconds):
                    value = _checked(self._scorer(text, row))
            except SampleTookTooLong:
                value = f"took longer than {self._seconds:g} s"
            except Exception as error:
                value = _describe(error)
                tracebacks[value] = _trace(error)
            if isinstance(value, str):
                errors[position] = value
            values.append(value if isinstance(value, float) else None)
        return Reply(
            values=values, errors=errors, error=None, metrics={}, extras={}, tracebacks=tracebacks
        )


async def _finish(result: Awaitable[Any]) -> Any:
    return await result


def _columns(call: RewardCall) -> dict[str, list[Any]]:
    """The data set's columns, one list entry per sample; None where a row lacks a column."""
    names = dict.fromkeys(name for row in call.rows for name in row)
    return {
        name: [row.get(name) for row in call.rows]
        for name in names
        if name not in TRL_HIDDEN_COLUMNS
    }


def _completions(call: RewardCall) -> list[Any]:
    """Text for a prompt that is text, a list with one message for a prompt of messages."""
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(call.prompts, call.completions, strict=True)
    ]


def _checked(value: Any) -> float | str | None:
    """A number that fits float32, None for "not applicable", or the reason why it is neither."""
    if value is None:
        return None
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        return f"returned {_shortened(repr(value), 60)}, which is not a number"
    if not math.isfinite(number) or abs(number) > 3e38:
        return f"returned {number}, which is not a finite float32"
    return number


def _failed_call(error: str, trace: str = "") -> Reply:
    tracebacks = {error: trace} if trace else {}
    return Reply(values=(), errors={}, error=error, metrics={}, extras={}, tracebacks=tracebacks)


def _printable(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _describe(error: Exception) -> str:
    """The error's type and text, and the line that raised it."""
    where = ""
    if frames := traceback.extract_tb(error.__traceback__):
        where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    return _shortened(f"{type(error).__name__}: {error}", _ERROR_CHARACTERS) + where


def _trace(error: Exception) -> str:
    """The traceback, from the function on: what called it is ours."""
    frames = error.__traceback__
    own = os.path.abspath(__file__)
    while frames is not None and frames.tb_next and frames.tb_frame.f_code.co_filename == own:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return text if len(text) <= _TRACE_CHARACTERS else f"…{text[-_TRACE_CHARACTERS:]}"


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


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
