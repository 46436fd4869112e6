"""Runs a function or method of a test's text as pytest and unittest do, and stands in for pytest.

Part of the program that tests (engines/rewards/testing_program.py), and handed to it as text: only
the standard library is imported, and nothing of ours. A sandbox's Python has no pytest; where it has,
this stands in its place all the same.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class TestOutcome(BaseException):
    """A test said itself that it has not passed; no test's own handlers catch it."""


class _Skipped(TestOutcome):
    pass


# What decorators have said, by the function or class.
_PARAMETERS: dict[Any, list[tuple[list[str], list[Any]]]] = {}  # the outermost decorator last
_FIXTURES: dict[Any, bool] = {}  # whether every test gets it


class _Param:
    def __init__(self, *values: Any, **named: Any) -> None:
        self.values = values


class _Mark:
    """pytest.mark: parametrize counts, what else it is asked for does nothing."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Mark:
        return _Mark(name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._name == "parametrize":
            return _parametrize(*arguments, **named)
        condition = arguments[0] if arguments else named.get("condition")
        if self._name == "skipif" and condition is True:
            return _instead(_skip)
        bare = len(arguments) == 1 and not named and callable(arguments[0])
        return arguments[0] if bare else lambda function: function


def _parametrize(argnames: Any, argvalues: Any, **named: Any) -> Callable[[Any], Any]:
    listed = isinstance(argnames, (list, tuple))
    names = argnames if listed else [n.strip() for n in argnames.split(",") if n.strip()]
    listed = listed or len(names) > 1
    rows = []
    for value in argvalues:
        values = value.values if isinstance(value, _Param) else value
        rows.append(list(values) if isinstance(value, _Param) or listed else [values])

    def decorate(function: Any) -> Any:
        _PARAMETERS.setdefault(function, []).append((names, rows))
        return function

    return decorate


def _instead(function: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda decorated: lambda *arguments, **named: function()


def _skip(*arguments: Any, **named: Any) -> Any:
    raise _Skipped("skipped")


def _fail(reason: str = "", **named: Any) -> Any:
    raise TestOutcome(f"failed: {reason}")


def _importorskip(name: str, **named: Any) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return _skip()


def _fixture(function: Any = None, *, autouse: bool = False, **named: Any) -> Any:
    def decorate(function: Any) -> Any:
        _FIXTURES[function] = autouse
        return function

    return decorate if function is None else decorate(function)


class _Raises:
    def __init__(self, expected: Any, match: str | None) -> None:
        self._expected, self._match = expected, match
        self.type: Any = None
        self.value: Any = None

    def match(self, pattern: str) -> bool:
        if re.search(pattern, str(self.value)) is None:
            raise AssertionError(f"{pattern!r} does not match {str(self.value)!r}")
        return True

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        if kind is None:
            raise TestOutcome(f"did not raise {self._expected}")
        if not issubclass(kind, self._expected):
            return False
        self.type, self.value = kind, value
        if self._match is not None:
            self.match(self._match)
        return True


def _raises(expected: Any, *call: Any, match: str | None = None, **named: Any) -> Any:
    if not call:
        return _Raises(expected, match)
    with _Raises(expected, match) as raised:
        call[0](*call[1:], **named)
    return raised


class _Approx:
    """Equal within max(rel * |expected|, abs), entry by entry."""

    __array_ufunc__ = None  # an array of numpy leaves the comparison to this
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False
    ) -> None:
        self._expected, self._rel, self._abs, self._nan = expected, rel, abs, nan_ok

    def __eq__(self, other: Any) -> bool:
        return self._equal(self._expected, other)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"

    def _equal(self, expected: Any, value: Any) -> bool:
        if isinstance(expected, Mapping):
            return (
                isinstance(value, Mapping)
                and expected.keys() == value.keys()
                and all(self._equal(expected[key], value[key]) for key in expected)
            )
        if isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
            return (
                isinstance(value, Sequence)
                and len(value) == len(expected)
                and all(map(self._equal, expected, value))
            )
        numbers = (int, float, complex)
        if not isinstance(expected, numbers) or not isinstance(value, numbers):
            return bool(expected == value)
        if expected == value:
            return True
        if expected != expected or value != value:
            return self._nan and expected != expected and value != value
        if math.isinf(abs(expected)):
            return False
        least = 1e-12 if self._abs is None else self._abs
        relative = self._rel if self._rel is not None else 1e-6 if self._abs is None else 0.0
        return abs(expected - value) <= max(relative * abs(expected), least)


def _stand_in() -> types.ModuleType:
    module = types.ModuleType("pytest")
    vars(module).update(
        approx=_Approx,
        fail=_fail,
        fixture=_fixture,
        importorskip=_importorskip,
        main=lambda *arguments, **named: 0,
        mark=_Mark(),
        param=_Param,
        raises=_raises,
        skip=_skip,
        xfail=_skip,
    )
    return module


sys.modules["pytest"] = _stand_in()


def run(names: dict[str, Any], test: Mapping[str, Any], candidate: Callable[[], Any]) -> None:
    """Run a test of a text that has been executed; raises unless it passes.

    Args:
        names: of the text.
        test: its function, or method and class, the number of its case; None: all of them.
        candidate: gives the function that a test is called with.
    """
    group = None
    if test["group"]:
        outer, *inner = test["group"].split(".")
        group = functools.reduce(getattr, inner, names[outer])
    # Importing it takes as long as a program does; so does asyncio.
    if group is not None and "unittest" in sys.modules:
        import unittest

        if issubclass(group, unittest.TestCase):
            _by_unittest(unittest, group, test["function"])
            return
    owner = group or types.SimpleNamespace(**{test["function"]: names[test["function"]]})
    function = inspect.getattr_static(owner, test["function"])
    function = getattr(function, "__func__", function)
    marks = [*_PARAMETERS.get(function, ()), *(_PARAMETERS.get(group, ()) if group else ())]
    cases = [
        {name: value for (chosen, _), row in zip(marks, rows) for name, value in zip(chosen, row)}  # noqa: B905
        for rows in itertools.product(*(rows for _, rows in marks))
    ]
    if not cases:
        raise TestOutcome("it has no cases")
    for number, case in enumerate(cases):
        if test["case"] in (None, number):
            _Case(names, group, test["function"], case, candidate).run()


class _Case:
    """One call of a function or method, with what comes before and after it."""

    def __init__(
        self,
        names: dict[str, Any],
        group: Any,
        function: str,
        arguments: dict[str, Any],
        candidate: Callable[[], Any],
    ) -> None:
        self._names, self._group, self._function = names, group, function
        self._values, self._candidate = arguments, candidate
        self._instance = group() if group is not None else None
        self._ends: list[Any] = []  # generators of fixtures

    def run(self) -> None:
        members = {name: getattr(self._instance, name) for name in dir(self._instance)}
        methods = members if self._group is not None else {}
        try:
            for name in ("setup_module", "setup_function"):
                self._extra(self._names.get(name))
            for name in ("setup_class", "setup_method", "setup"):
                self._extra(methods.get(name))
            for name, fixture in [*self._names.items(), *methods.items()]:
                if self._automatic(fixture):
                    self._value(name)
            function = methods.get(self._function) or self._names[self._function]
            _finished(function(**self._arguments(function)))
        finally:
            for generator in reversed(self._ends):
                _next(generator)
            for name in ("teardown", "teardown_method", "teardown_class"):
                self._extra(methods.get(name))
            for name in ("teardown_function", "teardown_module"):
                self._extra(self._names.get(name))

    def _extra(self, function: Any) -> None:
        """Call what goes before or after a test; its argument, if it takes one, is the test."""
        if isinstance(function, (types.FunctionType, types.MethodType)):
            takes = len(inspect.signature(function).parameters)
            _finished(function(*[self._names.get(self._function)][:takes]))

    def _automatic(self, fixture: Any) -> bool:
        function = (
            getattr(fixture, "__func__", fixture)
            if isinstance(fixture, types.MethodType)
            else fixture
        )
        return isinstance(function, types.FunctionType) and _FIXTURES.get(function, False)

    def _arguments(self, function: Any) -> dict[str, Any]:
        return {
            name: self._value(name)
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }

    def _value(self, name: str) -> Any:
        """Of an argument: of the case, of a fixture, or the function that is tested."""
        if name not in self._values:
            fixture = self._fixture(name)
            if fixture is None:
                self._values[name] = self._candidate()
            else:
                result = fixture(**self._arguments(fixture))
                if inspect.isgenerator(result) or inspect.isasyncgen(result):
                    self._ends.append(result)
                    result = _next(result)
                self._values[name] = _finished(result)
        return self._values[name]

    def _fixture(self, name: str) -> Any:
        for place in (self._instance, types.SimpleNamespace(**self._names)):
            method = getattr(place, name, None)
            function = method.__func__ if isinstance(method, types.MethodType) else method
            if isinstance(function, types.FunctionType) and function in _FIXTURES:
                return method
        return None


_loop: list[Any] = []  # one for all that is awaited


def _finished(result: Any) -> Any:
    """A result, of a coroutine too."""
    if not inspect.iscoroutine(result):
        return result
    if not _loop:
        import asyncio

        _loop.append(asyncio.new_event_loop())
    return _loop[0].run_until_complete(result)


def _next(generator: Any) -> Any:
    if inspect.isasyncgen(generator):
        return _finished(_anext(generator))
    return next(generator, None)


async def _anext(generator: Any) -> Any:
    return await anext(generator, None)


def _by_unittest(unittest: Any, group: Any, method: str) -> None:
    first: list[BaseException] = []  # the errors, as they were raised

    class Result(unittest.TestResult):
        def addError(self, test: Any, err: Any) -> None:
            first.append(err[1])

        addFailure = addError

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                first.append(err[1])

    case = group(method)
    function = getattr(case, method)
    if inspect.iscoroutinefunction(function) and not isinstance(
        case, unittest.IsolatedAsyncioTestCase
    ):
        vars(case)[method] = lambda: _finished(function())  # unittest would not await it
    result = Result()
    unittest.TestSuite([case]).run(result)
    if first:
        raise first[0]
    passed = result.testsRun == 1 and not result.skipped
    if not passed or result.expectedFailures or result.unexpectedSuccesses:
        raise TestOutcome("it did not run to its end")
