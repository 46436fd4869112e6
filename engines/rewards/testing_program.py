"""Runs unit tests of a program in a sandbox, and keeps the program from making up their results.

It reads the program and its tests from its standard input. First it looks whether the tests can be
run, while nothing of the program is here: where one cannot, it writes why and ends. Else it writes a
line that it begins, and one for each test; nothing that comes after the first line, whatever the
program did, says that a test cannot be run.

A test never runs in the program's process: the program is loaded in a process of its own, anew for
each test, and the test calls its functions from here. What they return comes back as plain data, so
that no object of the program decides whether it equals what was expected; the program sees the
arguments of calls, never a test or an expected value. The kernel lets it neither read this process
nor write to it; if it kills this process, the tests that are left have not passed.

Handed to Python as text: only the standard library is imported, and nothing of ours.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import io
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import namedtuple
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

PR_SET_DUMPABLE = 4  # linux/prctl.h
ERROR = 200  # characters of an error that are kept
LARGEST = 2**26  # bytes of an answer of the program

# Types, besides those that pickle knows itself, of values that programs and tests give each other.
PLAIN = {
    "builtins": {"bytearray", "complex", "dict", "frozenset", "int", "list", "range", "set", "str"}
    | {"float", "slice", "tuple"},
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
}

# Modules that tests use without importing them.
PRELOADED = frozenset(
    {"asyncio", "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools"}
    | {"heapq", "itertools", "json", "math", "operator", "pytest", "random", "re", "statistics"}
    | {"string", "sys", "unittest"}
)


def _classes() -> list[dict[str, Any]]:
    """What the classes of plain data are made of."""
    kinds = [
        getattr(importlib.import_module(m), n) for m in sorted(PLAIN) for n in sorted(PLAIN[m])
    ]
    return [dict(vars(kind)) for kind in kinds]


CLASSES = _classes()

PACKAGE = "package_of_tests"  # for `from .solution import add`
PROGRAMS = frozenset({"__main__", "answer", "candidate", "main", "program", "solution"})
# What is missing under these names is a library, and under others the program.
LIBRARIES = frozenset(
    {
        "attr",
        "bs4",
        "cv2",
        "freezegun",
        "hypothesis",
        "jax",
        "matplotlib",
        "mock",
        "networkx",
        "nose",
    }
    | {"nltk", "numpy", "pandas", "parameterized", "PIL", "pydantic", "pytz", "requests", "scipy"}
    | {"seaborn", "sklearn", "sortedcontainers", "sympy", "tensorflow", "torch", "yaml"}
)


class Unusable(Exception):
    """A test cannot be run, whatever the program; raised before any is loaded."""


class ProgramFailed(Exception):
    """The program's process gave no answer."""


class TestFailed(Exception):
    """The program's answers are not what the test expects."""


class Thing:
    """A function, class or object of the program, which stays where it is."""

    def __init__(self, program: TestedProgram, number: int) -> None:
        vars(self).update(_Thing__program=program, _Thing__number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__program.ask("call", self.__number, "", arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__qualname__", "__wrapped__"):
            raise AttributeError(name)
        return self.__program.ask("attribute", self.__number, name, (), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self.__program.ask("set", self.__number, name, (value,), {})

    def __str__(self) -> str:
        return self.__text("str")

    def __repr__(self) -> str:
        return self.__text("repr")

    def __text(self, which: str) -> str:
        text = self.__program.ask("text", self.__number, which, (), {})
        return text if type(text) is str else "an object of the program"

    def __instancecheck__(self, instance: Any) -> bool:
        if type(instance) is not Thing:
            return False
        return self.__program.ask("is a", self.__number, "", (instance,), {}) is True

    def __enter__(self) -> Any:
        return self.__program.ask("enter", self.__number, "", (), {})

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        """It keeps no error from being raised: one may be a test's own, or the program's."""
        builtin = value is not None and kind.__module__ == "builtins"
        self.__program.ask("exit", self.__number, "", (value if builtin else None,), {})

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__program.ask("items", self.__number, "", (), {}))

    def __next__(self) -> Any:
        return self.__program.ask("next", self.__number, "", (), {})

    def __getitem__(self, key: Any) -> Any:
        return self.__program.ask("item", self.__number, "", (key,), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__program.ask("set item", self.__number, "", (key, value), {})

    def __delitem__(self, key: Any) -> None:
        self.__program.ask("delete item", self.__number, "", (key,), {})

    def __len__(self) -> int:
        size = self.__program.ask("length", self.__number, "", (), {})
        return size if type(size) is int else 0

    def __bool__(self) -> bool:
        return True  # and not its length, which need not exist

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("the program writes what a Thing is")

    def number_of(self, program: TestedProgram) -> int | None:
        """Its number in a program; None if it is another's."""
        return self.__number if program is self.__program else None


class _Sealed(type):
    """Of classes that a pickle must not change, as it could say then what they equal."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise AttributeError(name)


class TestedProgram:
    """A process of the program; `loader` is the text of engines/rewards/tested_program.py."""

    def __init__(self, loader: str, deadline: float) -> None:
        orders, answers = os.pipe(), os.pipe()
        self._deadline = deadline
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", loader, str(orders[0]), str(answers[1])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(orders[0], answers[1]),
            start_new_session=True,
        )
        os.close(orders[0])
        os.close(answers[1])
        self._orders, self._answers = orders[1], answers[0]
        self.arrays = types.ModuleType("arrays")  # both sides have them alike
        exec(loader, vars(self.arrays))
        self.names: dict[str, Any] = {}
        self.lost: str | None = None  # why it gives no more answers; no test passes then
        self._exceptions: dict[int, type[BaseException]] = {}
        self._things: dict[int, Thing] = {}
        self._classes: dict[tuple[str, tuple[str, ...]], Any] = {}  # of named tuples
        self._tuples: dict[int, tuple[Any, Thing]] = {}  # those, by id

    def thing(self, number: int) -> Thing:
        """An object of the program: one here for each there."""
        return self._things.setdefault(number, Thing(self, number))

    def named(self, number: int, name: str, fields: tuple[str, ...], values: Any) -> Any:
        """A named tuple of the program, as one whose methods are asked for there."""
        if (name, fields) not in self._classes:
            self._classes[name, fields] = self._named_class(name, fields)
        value = self._classes[name, fields](*values)
        self._tuples[id(value)] = (value, self.thing(number))
        return value

    def _named_class(self, name: str, fields: tuple[str, ...]) -> Any:
        base: Any = namedtuple(name, fields)  # type: ignore[misc]  # ValueError for an odd name
        program = self

        class Named(base):
            def __getattr__(self, attribute: str) -> Any:
                return getattr(program.stands_for(self), attribute)

            def __setstate__(self, state: Any) -> NoReturn:
                raise pickle.UnpicklingError("the program writes what a tuple is")

        Named.__name__ = Named.__qualname__ = name
        return Named

    def stands_for(self, value: Any) -> Any:
        """The Thing that a value is, or is a named tuple of; None for everything else."""
        if type(value) is Thing:
            return value
        twin, number = self._tuples.get(id(value), (None, None))
        return number if twin is value else None

    def load(self, source: str) -> None:
        """Run the program's text; its names are there then."""
        self._send(pickle.dumps(PLAIN, 4) + pickle.dumps(source, 4))
        names = self._receive()[1]
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names):
            raise self._loss("gave no names")
        # It may have written the answer itself: a test's __builtins__ and the like are not its own.
        self.names = {k: v for k, v in names.items() if k.isidentifier() and k[:2] != "__"}

    def awaited(self, number: int) -> Any:
        """A coroutine of the program, as one of this process."""

        async def result() -> Any:
            return self.ask("await", number, "", (), {})

        return result()

    def exception(self, number: int, name: str, bases: tuple[Any, ...]) -> type[BaseException]:
        """A class of this process that stands for one of the program's exceptions."""
        if number not in self._exceptions:
            if not bases or not all(
                isinstance(b, type) and issubclass(b, BaseException) for b in bases
            ):
                raise pickle.UnpicklingError(name)
            self._exceptions[number] = _Sealed(name, bases, {})  # type: ignore[assignment]
        return self._exceptions[number]

    def _loss(self, why: str) -> ProgramFailed:
        """To be raised; a test that catches it has not passed either."""
        self.lost = self.lost or why
        return ProgramFailed(why)

    def ask(
        self, what: str, number: int, name: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """What a thing of the program gives; its exception, if it is a built-in one, is raised."""
        if self.lost is not None:
            raise ProgramFailed(self.lost)
        buffer = io.BytesIO()
        try:
            _Pickler(self, buffer, 4).dump((what, _Reference(number), name, arguments, named))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            # What it is may be the program's doing. What is the test's own is known by its text.
            raise ProgramFailed(str(error)) from None
        self._send(buffer.getvalue())
        try:
            _, value, after, after_named = self._receive()
        except (StopIteration, StopAsyncIteration) as error:
            if what == "next":
                raise
            # Else a test that maps a function over its cases would take it for their end.
            raise ProgramFailed(f"{type(error).__name__}: {error}") from None
        for before, now in [*zip(arguments, after), *((named[k], after_named[k]) for k in named)]:  # noqa: B905
            _change(before, now)
        return value

    def close(self) -> None:
        """Kill the process; what is asked of it then is an error, as where one's text is printed."""
        self.lost = self.lost or "the program has ended"
        _end(self._process)
        os.close(self._orders)
        os.close(self._answers)

    def _send(self, data: bytes) -> None:
        os.set_blocking(self._orders, False)
        while data:
            self._wait(self._orders, select.POLLOUT)
            try:
                data = data[os.write(self._orders, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._loss("the program has ended") from None

    def _wait(self, descriptor: int, event: int) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(self._deadline - time.monotonic(), 0) * 1000):
            raise self._loss("took too long")

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            self._wait(self._answers, select.POLLIN)
            part = os.read(self._answers, min(size, 2**20))
            if not part:
                raise self._loss("the program has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _receive(self) -> tuple[Any, ...]:
        size = int.from_bytes(self._exactly(8), "big")
        if size > LARGEST:
            raise self._loss(f"gave {size} bytes")
        try:
            message = _Unpickler(self, io.BytesIO(self._exactly(size))).load()
        except ProgramFailed:
            raise
        except Exception:  # the program wrote the answer itself
            raise self._loss("gave what is no plain data") from None
        finally:
            # A pickle that is made for it sets attributes of classes, which would then decide what is
            # equal. What runs here cannot be trusted any more: no further test passes.
            if _classes() != CLASSES:
                os._exit(1)
        if not isinstance(message, tuple) or not message:
            raise self._loss("gave no answer")
        if message[0] == "raised" and len(message) == 3:
            raise _exception(message[1], str(message[2]))
        if (message[0], len(message)) in (("gave", 4), ("loaded", 2)):
            return message
        raise self._loss("gave no answer")


class _Reference:
    def __init__(self, number: int) -> None:
        self.number = number


class _Pickler(pickle.Pickler):
    def __init__(self, program: TestedProgram, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._program = program

    def persistent_id(self, value: Any) -> int | tuple[Any, ...] | None:
        if type(value) is _Reference:
            return value.number
        if (stand_in := self._program.stands_for(value)) is not None:
            number: int | None = stand_in.number_of(self._program)
            return number
        return self._program.arrays.array_id(value)

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, BaseException) and kind.__module__ == "builtins":
            return NotImplemented
        if kind.__name__ not in PLAIN.get(kind.__module__, ()):
            raise pickle.PicklingError(f"a test hands the program a {kind.__name__}")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, program: TestedProgram, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._program = program

    def persistent_load(self, number: Any) -> Any:
        match number:
            case ("built-in", str(name)):
                return _builtin_exception(name)
            case ("exception", int(number), str(name), tuple(bases)):
                return self._program.exception(number, name, bases)
            case ("coroutine", int(number)):
                return self._program.awaited(number)
            case ("array", str(dtype), tuple() | None as shape, bytes(data)):
                return self._program.arrays.array_of(dtype, shape, data)
            case ("named", int(number), str(name), tuple(fields), tuple(values)):
                return self._program.named(number, name, fields, values)
            case _:
                return self._program.thing(int(number))

    def find_class(self, module: str, name: str) -> Any:
        # Python writes the names of its version 2 only in older protocols than the program's side.
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _builtin_exception(name: str) -> type[BaseException]:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind
    raise pickle.UnpicklingError(name)


def _exception(kind: Any, text: str) -> BaseException:
    """What the program raised, as a test may expect it."""
    if kind is SystemExit:
        return SystemExit(int(text) if text.isdecimal() else text)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
        try:
            error = kind(text)
        except TypeError:  # it wants other arguments
            error = None
        if isinstance(error, Exception):
            return error
    name = kind.__name__ if isinstance(kind, type) else "error"
    return ProgramFailed(f"{name}: {text}"[:ERROR])


def _change(target: Any, source: Any) -> None:
    """Give a container that was an argument the contents that the call left in it."""
    if type(target) is not type(source):
        return
    if isinstance(target, list):
        target[:] = source
    elif type(target).__name__ == "ndarray" and target.shape == source.shape:
        target[...] = source
    elif isinstance(target, (dict, set)):
        target.clear()
        target.update(source)


def by_calls(
    source: str, loader: str, cases: Any, test: dict[str, Any], aliases: set[str], seconds: float
) -> None:
    """One test that calls the program: statements, or a function or method of theirs."""
    text = test["setup"] + "\n" + test["code"]
    program = TestedProgram(loader, time.monotonic() + seconds)
    try:
        program.load(source)
        names = _namespace(program, text, aliases, "tests" if test["function"] else "__main__")
        for part in ("setup", "code"):  # without what this file imports from __future__
            exec(compile(test[part], part, "exec", dont_inherit=True), names)
        if test["function"]:
            cases.run(names, test, lambda: _named(program, test["argument"]))
        if program.lost is not None:
            raise ProgramFailed(program.lost)
    finally:
        for alias in aliases:
            sys.modules.pop(alias, None)
        program.close()


def _named(program: TestedProgram, name: str) -> Any:
    """What a row names as tested: a function, a method of Solution, or Solution().method."""
    if name.isidentifier() and name not in program.names and "Solution" in program.names:
        return getattr(program.names["Solution"](), name)
    if name.isidentifier():
        return program.names[name]
    return eval(name, {"__builtins__": {}, **program.names})


def _namespace(program: TestedProgram, text: str, aliases: set[str], name: str) -> dict[str, Any]:
    """Where a test runs: it has the program's names, and finds them by import too.

    A program's own `len` or `sorted` must not judge what it returns, nor what it calls like one of
    the names that the test imports or defines, which `from solution import *` would bring.
    """
    bound = _bound(text)
    names = {k: v for k, v in program.names.items() if not hasattr(builtins, k)}
    stands_for = types.ModuleType("solution")
    vars(stands_for).update(program.names)
    vars(stands_for).update({"__all__": [k for k in names if k not in bound], "__path__": []})
    for alias in aliases:
        sys.modules[alias] = stands_for
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update({**names, **_modules(text), "__package__": PACKAGE})
    return vars(module)


def _bound(text: str) -> set[str]:
    """Names that a text imports or defines."""
    names: set[str] = set(PRELOADED)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def aliases_of(text: str) -> set[str]:
    """Names of modules under which a text imports the program: those that there are not.

    Unusable where what is missing is a library's.
    """
    aliases: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases |= _missing(alias.name, ())
        elif isinstance(node, ast.ImportFrom) and node.level:
            aliases |= {PACKAGE, f"{PACKAGE}.{node.module}"}
        elif isinstance(node, ast.ImportFrom):
            aliases |= _missing(str(node.module), [alias.name for alias in node.names])
    return aliases


def _missing(name: str, attributes: Iterable[str]) -> set[str]:
    """A module and those around it, if it is not there; Unusable if it lacks what is asked of it."""
    parts = name.split(".")
    around = {".".join(parts[: n + 1]) for n in range(len(parts))}
    if name in PROGRAMS:
        return around
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        if parts[0] in LIBRARIES or parts[0] in sys.stdlib_module_names:
            raise Unusable(
                f"it imports {name}, which the sandbox's Python does not have. Set sandbox.python to "
                "an interpreter that has it"
            ) from None
        return around
    except Exception as error:
        raise Unusable(f"it imports {name}, which raises {type(error).__name__}: {error}") from None
    for attribute in attributes:
        if attribute != "*" and not hasattr(module, attribute):
            _missing(f"{name}.{attribute}", ())
            if f"{name}.{attribute}" not in sys.modules:
                raise Unusable(f"it imports {attribute} from {name}, which has none")
    return set()


def _modules(code: str) -> dict[str, Any]:
    """Modules of Python that a test reaches into; without an import of its own it gets them too.

    Data sets have such tests, as the program is used to import them. They must not be the program's.
    """
    used = {
        node.value.id
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return {name: importlib.import_module(name) for name in used & PRELOADED}


def by_output(source: str, test: dict[str, Any], seconds: float) -> None:
    """One test that gives the program its standard input and compares what it prints."""
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as printed,  # as large as the sandbox lets a file be
        tempfile.TemporaryFile() as errors,
    ):
        given.write(test["input"].encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", source],
            stdin=given,
            stdout=printed,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ProgramFailed("took too long") from None
        finally:
            _end(process)
        printed.seek(0)
        out = printed.read(LARGEST).decode(errors="replace")
        errors.seek(0)
        lines = errors.read(LARGEST).decode(errors="replace").strip().splitlines()
    if process.returncode != 0:
        raise ProgramFailed(f"exited with {process.returncode}: {lines[-1] if lines else ''}")
    if _lines(out) != _lines(test["output"]):
        raise TestFailed("printed something else")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group; what it started besides ends with the sandbox's run."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def result_of(
    source: str, loader: str, cases: Any, test: dict[str, Any], aliases: set[str], seconds: float
) -> dict[str, Any]:
    """What one test came to."""
    started = time.monotonic()
    error = None
    try:
        # Where a test itself does not end, with what the program gave it.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)
        if test["kind"] == "calls":
            by_calls(source, loader, cases, test, aliases, seconds)
        else:
            by_output(source, test, seconds)
        if time.monotonic() - started > seconds + 1.0:  # the test has caught what the alarm raised
            error = "took too long"
    except (ProgramFailed, TestFailed) as problem:
        error = str(problem) or "failed"
    except BaseException as problem:
        error = "".join(traceback.format_exception_only(type(problem), problem)).strip() or "failed"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return {
        "passed": error is None,
        "error": None if error is None else error[:ERROR],
        "seconds": round(time.monotonic() - started, 4),
    }


def usable(test: dict[str, Any]) -> set[str]:
    """The names under which a test imports the program. Unusable if it cannot be run."""
    if test["kind"] != "calls":
        return set()
    text = test["setup"] + "\n" + test["code"]
    aliases = aliases_of(text)
    _look_at_arguments(text)
    return aliases


def _look_at_arguments(text: str) -> None:
    """Unusable where a text calls the program with a function, generator or object of its own."""
    nodes = list(ast.walk(ast.parse(text)))
    functions = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    classes = {n.name for n in nodes if isinstance(n, ast.ClassDef) and not n.bases}
    known_names = _bound(text) | set(vars(builtins))
    # An argument hides a function of its name, such as a fixture.
    arguments = {n.arg for n in nodes if isinstance(n, ast.arg)}
    functions, classes = functions - arguments, classes - arguments
    known_names |= arguments - {"candidate"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            known_names |= set(vars(sys.modules.get(str(node.module), builtins)))

    def look(value: ast.expr) -> None:
        if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
            for element in value.elts:
                look(element)
        name = value.id if isinstance(value, ast.Name) else ""
        called = value.func if isinstance(value, ast.Call) else None
        maker = called.id if isinstance(called, ast.Name) else ""
        if isinstance(value, ast.Lambda) or name in functions:
            raise Unusable("a test hands the program a function")
        if isinstance(value, ast.GeneratorExp) or name in classes or maker in classes:
            kind = "generator" if isinstance(value, ast.GeneratorExp) else name or maker
            raise Unusable(f"a test hands the program a {kind}")

    for node in nodes:
        if isinstance(node, ast.Call) and _root(node.func) not in known_names | {""}:
            for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                look(value)


def _root(node: ast.expr) -> str:
    """The name that add or Solution().add begins with; empty if with none, or a call's value."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        if isinstance(node, ast.Attribute):
            node = node.value
        elif isinstance(node.func, ast.Name) and node.func.id[:1].isupper():  # a class
            node = node.func
        else:
            return ""
    return node.id if isinstance(node, ast.Name) else ""


def _ring(signum: int, frame: object) -> NoReturn:
    raise ProgramFailed("took too long")


def main() -> NoReturn:
    """Read the program and its tests, and write the results."""
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        os._exit(1)  # then the program could read the tests, and write results
    request = json.load(sys.stdin)
    signal.signal(signal.SIGALRM, _ring)
    results = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # a test may print
    os.dup2(null, 0)
    cases = types.ModuleType("cases")
    exec(compile(request["cases"], "cases", "exec"), vars(cases))
    try:
        aliases = [usable(test) for test in request["tests"]]
    except Unusable as problem:
        _write(results, {"unusable": str(problem)[:ERROR]})
        os._exit(0)
    os.write(results, b"begun\n")
    for test, names in zip(request["tests"], aliases):  # noqa: B905
        result = result_of(
            request["source"], request["loader"], cases, test, names, request["seconds"]
        )
        _write(results, result)
        if request["begin"] and not result["passed"]:
            break
    os._exit(0)


def _write(results: int, result: dict[str, Any]) -> None:
    line = json.dumps(result, ensure_ascii=False)
    os.write(results, line.encode(errors="replace") + b"\n")


if __name__ == "__main__":
    main()
