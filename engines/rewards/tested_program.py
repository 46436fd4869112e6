"""The process of a program that unit tests call; engines/rewards/testing_program.py starts it.

Handed to Python as text: only the standard library is imported, and nothing of ours. Nothing here
guards anything: the program may change all of it, and then answers for itself.
"""

from __future__ import annotations
import __future__

import io
import os
import pickle
import sys
import types
from typing import IO, Any, NoReturn


def array_id(value: Any) -> tuple[Any, ...] | None:
    """An array or a number of numpy as plain values; None for what is neither."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if type(value).__module__ != "numpy" or value.dtype.kind not in "biufc":
        return None
    shape = value.shape if isinstance(value, numpy.ndarray) else None
    return ("array", value.dtype.str, shape, value.tobytes())


def array_of(dtype: str, shape: tuple[int, ...] | None, data: bytes) -> Any:
    """What `array_id` was made of; ValueError where it is no array of numbers."""
    import numpy

    if len(dtype) < 3 or dtype[1] not in "biufc":
        raise ValueError(dtype)
    flat = numpy.frombuffer(data, dtype).copy()
    return flat[0] if shape is None else flat.reshape(shape)


class Pickler(pickle.Pickler):
    """Writes plain data, and numbers for everything else."""

    def __init__(
        self,
        file: IO[bytes],
        plain: dict[str, set[str]],
        objects: list[Any],
        numbers: dict[int, int],
    ) -> None:
        super().__init__(file, 4)
        self._plain, self._things = plain, objects
        self._numbers = numbers  # place of each thing, by its id

    def persistent_id(self, value: Any) -> int | tuple[Any, ...] | None:
        """The number of what stays in this process, with what the other side makes of it.

        A coroutine is one there too, a named tuple is one with the same fields, and a class of
        exceptions has one that stands for it.
        """
        kind = value if type(value) is type else type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes):
            return None
        if kind.__name__ in self._plain.get(kind.__module__, ()):
            return None
        if isinstance(value, type) and issubclass(value, BaseException):
            if value.__module__ == "builtins":
                return ("built-in", value.__name__)
            bases = tuple(b for b in value.__bases__ if issubclass(b, BaseException))
            return ("exception", self._number(value), value.__name__, bases)
        if type(value) is types.CoroutineType:
            return ("coroutine", self._number(value))
        fields = getattr(kind, "_fields", None)
        if isinstance(value, tuple) and type(fields) is tuple:
            return ("named", self._number(value), kind.__name__, fields, tuple(value))
        return array_id(value) or self._number(value)

    def _number(self, value: Any) -> int:
        """The place of an object among those that stay: of one object always the same."""
        number = self._numbers.setdefault(id(value), len(self._things))
        if number == len(self._things):
            self._things.append(value)  # and so its id stays its own
        return number


class Unpickler(pickle.Unpickler):
    """Reads what `Pickler` wrote."""

    def __init__(self, file: IO[bytes], objects: list[Any]) -> None:
        super().__init__(file)
        self._things = objects

    def persistent_load(self, number: Any) -> Any:
        """What stayed in this process, or an array."""
        if isinstance(number, tuple):
            return array_of(*number[1:])
        return self._things[number]


def loaded(source: str) -> types.ModuleType:
    """The module of a program.

    LeetCode's have annotations without the import of typing that they need: these are run again,
    their annotations unevaluated.
    """
    unevaluated = __future__.annotations.compiler_flag
    for flags in (0, unevaluated):
        module = sys.modules["program"] = types.ModuleType("program")
        code = compile(source, "program", "exec", flags, dont_inherit=True)
        try:
            exec(code, module.__dict__)
            break
        except NameError:
            if flags == unevaluated:
                raise
    return module


def main(orders: IO[bytes], answers: IO[bytes]) -> NoReturn:
    """Load the program, then do what it is told to until it is killed."""
    plain = pickle.load(orders)
    source = pickle.load(orders)
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def answer(*values: Any) -> None:
        buffer = io.BytesIO()
        Pickler(buffer, plain, objects, numbers).dump(values)
        data = buffer.getvalue()
        answers.write(len(data).to_bytes(8, "big") + data)
        answers.flush()

    def told(error: BaseException) -> None:
        answer("raised", type(error), str(error)[:300])

    try:
        module = loaded(source)
        names = {k: v for k, v in vars(module).items() if not k.startswith("__")}
        answer("loaded", {k: v for k, v in names.items() if type(v) is not types.ModuleType})
    except BaseException as error:
        told(error)
        os._exit(1)
    loop: Any = None  # one for all that is awaited
    while True:
        what, value, name, arguments, named = Unpickler(orders, objects).load()
        try:
            match what:
                case "call":
                    answer("gave", value(*arguments, **named), arguments, named)
                case "attribute":
                    answer("gave", getattr(value, name), (), {})
                case "items":
                    answer("gave", list(value), (), {})
                case "item":
                    answer("gave", value[arguments[0]], (), {})
                case "next":
                    answer("gave", next(value), (), {})
                case "await":
                    import asyncio

                    loop = loop or asyncio.new_event_loop()
                    answer("gave", loop.run_until_complete(value), (), {})
                case "length":
                    answer("gave", len(value), (), {})
                case "text":
                    answer("gave", str(value) if name == "str" else repr(value), (), {})
                case "set":
                    setattr(value, name, arguments[0])
                    answer("gave", None, (), {})
                case "set item":
                    value[arguments[0]] = arguments[1]
                    answer("gave", None, (), {})
                case "delete item":
                    del value[arguments[0]]
                    answer("gave", None, (), {})
                case "is a":
                    answer("gave", isinstance(arguments[0], value), (), {})
                case "enter":
                    answer("gave", type(value).__enter__(value), (), {})
                case "exit":
                    kind = type(arguments[0]) if arguments[0] is not None else None
                    type(value).__exit__(value, kind, arguments[0], None)
                    answer("gave", None, (), {})
        except BaseException as error:
            told(error)


if __name__ == "__main__":
    main(os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb"))
