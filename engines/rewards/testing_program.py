"""Runs unit tests of a program in a sandbox, and keeps the program from making up their results.

It reads the program and its tests from its standard input, and writes a line when it begins and one
for each test. A test never runs in the program's process: the program is loaded in a process of its
own, anew for each test, and the test calls its functions from here. What they return comes back as
plain data, so that no object of the program decides whether it equals what was expected; the program
sees the arguments of calls, never a test or an expected value. The kernel lets it neither read this
process nor write to it; if it kills this process, the tests that are left have not passed.

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
from collections.abc import Iterator
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
    {"bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq"}
    | {"itertools", "json", "math", "operator", "random", "re", "statistics", "string", "sys"}
)


def _classes() -> list[dict[str, Any]]:
    """What the classes of plain data are made of."""
    kinds = [
        getattr(importlib.import_module(m), n) for m in sorted(PLAIN) for n in sorted(PLAIN[m])
    ]
    return [dict(vars(kind)) for kind in kinds]


CLASSES = _classes()


class NotPlain(Exception):
    """A test hands the program something that cannot leave this process."""


class ProgramFailed(Exception):
    """The program's process gave no answer."""


class TestFailed(Exception):
    """The program's answers are not what the test expects."""


class Thing:
    """A function, class or object of the program, which stays where it is."""

    def __init__(self, program: Program, number: int) -> None:
        self.__program, self.__number = program, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__program.ask("call", self.__number, "", arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__program.ask("attribute", self.__number, name, (), {})

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__program.ask("items", self.__number, "", (), {}))

    def __getitem__(self, key: Any) -> Any:
        return self.__program.ask("item", self.__number, "", (key,), {})

    def __len__(self) -> int:
        size = self.__program.ask("length", self.__number, "", (), {})
        return size if type(size) is int else 0

    def __bool__(self) -> bool:
        return True  # and not its length, which need not exist

    def number_of(self, program: Program) -> int | None:
        """Its number in a program; None if it is another's."""
        return self.__number if program is self.__program else None


class Program:
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
        self.names: dict[str, Any] = {}

    def load(self, source: str) -> None:
        """Run the program's text; its names are there then."""
        self._send(pickle.dumps(PLAIN, 4) + pickle.dumps(source, 4))
        names = self._receive()[1]
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names):
            raise ProgramFailed("gave no names")
        self.names = names

    def ask(
        self, what: str, number: int, name: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """What a thing of the program gives; its exception, if it is a built-in one, is raised."""
        buffer = io.BytesIO()
        try:
            _Pickler(self, buffer, 4).dump((what, _Reference(number), name, arguments, named))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise NotPlain(str(error)) from None
        self._send(buffer.getvalue())
        _, value, after, after_named = self._receive()
        for ours, theirs in [*zip(arguments, after), *((named[k], after_named[k]) for k in named)]:  # noqa: B905
            _change(ours, theirs)
        return value

    def close(self) -> None:
        """Kill the process."""
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
                raise ProgramFailed("the program has ended") from None

    def _wait(self, descriptor: int, event: int) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(self._deadline - time.monotonic(), 0) * 1000):
            raise ProgramFailed("took too long")

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            self._wait(self._answers, select.POLLIN)
            part = os.read(self._answers, min(size, 2**20))
            if not part:
                raise ProgramFailed("the program has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _receive(self) -> tuple[Any, ...]:
        size = int.from_bytes(self._exactly(8), "big")
        if size > LARGEST:
            raise ProgramFailed(f"gave {size} bytes")
        try:
            found = _Unpickler(self, io.BytesIO(self._exactly(size))).load()
        except ProgramFailed:
            raise
        except Exception:  # the program wrote the answer itself
            raise ProgramFailed("gave what is no plain data") from None
        finally:
            # A pickle that is made for it sets attributes of classes, which would then decide what is
            # equal. What runs here cannot be trusted any more: no further test passes.
            if _classes() != CLASSES:
                os._exit(1)
        if not isinstance(found, tuple) or not found:
            raise ProgramFailed("gave no answer")
        if found[0] == "raised" and len(found) == 3:
            raise _exception(found[1], found[2])
        if (found[0], len(found)) in (("gave", 4), ("loaded", 2)):
            return found
        raise ProgramFailed("gave no answer")


class _Reference:
    def __init__(self, number: int) -> None:
        self.number = number


class _Pickler(pickle.Pickler):
    def __init__(self, program: Program, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._program = program

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is _Reference:
            return value.number
        return value.number_of(self._program) if type(value) is Thing else None

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        if kind.__name__ not in PLAIN.get(kind.__module__, ()):
            raise pickle.PicklingError(f"a test hands the program a {kind.__name__}")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, program: Program, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._program = program

    def persistent_load(self, number: Any) -> Thing:
        return Thing(self._program, int(number))

    def find_class(self, module: str, name: str) -> Any:
        # Python writes the names of its version 2 only in older protocols than the program's side.
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _exception(name: Any, text: Any) -> Exception:
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
        try:
            return kind(str(text))
        except TypeError:  # it wants other arguments
            pass
    return ProgramFailed(f"{name}: {text}"[:ERROR])


def _change(ours: Any, theirs: Any) -> None:
    """Give a container that was an argument the contents that the call left in it."""
    if type(ours) is not type(theirs):
        return
    if isinstance(ours, list):
        ours[:] = theirs
    elif isinstance(ours, (dict, set)):
        ours.clear()
        ours.update(theirs)


def by_calls(source: str, loader: str, test: dict[str, Any], seconds: float) -> None:
    """One test that calls the program: statements, and a function of theirs if the test names one."""
    program = Program(loader, time.monotonic() + seconds)
    try:
        program.load(source)
        # A program's own `len` or `sorted` must not judge what it returns.
        own = {k: v for k, v in program.names.items() if not hasattr(builtins, k)}
        names = {**own, **_modules(test["setup"] + "\n" + test["code"]), "__name__": "test"}
        exec(compile(test["setup"], "setup", "exec"), names)
        exec(compile(test["code"], "test", "exec"), names)
        if test["function"]:
            given = [program.names[test["argument"]]] if test["argument"] else []
            names[test["function"]](*given)
    finally:
        program.close()


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
        said = errors.read(LARGEST).decode(errors="replace").strip().splitlines()
    if process.returncode != 0:
        raise ProgramFailed(f"exited with {process.returncode}: {said[-1] if said else ''}")
    if _lines(out) != _lines(test["output"]):
        raise TestFailed("printed something else")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group; what it started besides ends with the sandbox's run."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def result_of(source: str, loader: str, test: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What one test came to."""
    started = time.monotonic()
    error = None
    unusable = False
    try:
        # Where a test itself does not end, with what the program gave it.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)
        if test["kind"] == "output":
            by_output(source, test, seconds)
        else:
            by_calls(source, loader, test, seconds)
    except NotPlain as problem:
        error, unusable = str(problem), True
    except (ProgramFailed, TestFailed) as problem:
        error = str(problem)
    except BaseException as problem:
        error = "".join(traceback.format_exception_only(type(problem), problem)).strip()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return {
        "passed": error is None,
        "error": None if error is None else error[:ERROR],
        "unusable": unusable,
        "seconds": round(time.monotonic() - started, 4),
    }


def _ring(signum: int, frame: object) -> NoReturn:
    raise ProgramFailed("took too long")


def main() -> NoReturn:
    """Read the program and its tests, and write the results."""
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        os._exit(1)  # then the program could read the tests, and write results
    asked = json.load(sys.stdin)
    signal.signal(signal.SIGALRM, _ring)
    results = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # a test may print
    os.dup2(null, 0)
    os.write(results, b"begun\n")
    for test in asked["tests"]:
        result = result_of(asked["source"], asked["loader"], test, asked["seconds"])
        line = json.dumps(result, ensure_ascii=False)
        os.write(results, line.encode(errors="replace") + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
