"""The process of a program that unit tests call; engines/rewards/testing_program.py starts it.

Handed to Python as text: only the standard library is imported, and nothing of ours. Nothing here
guards anything: the program may change all of it, and then answers for itself.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from typing import IO, Any, NoReturn


class Pickler(pickle.Pickler):
    """Writes plain data, and numbers for everything else."""

    def __init__(self, file: IO[bytes], plain: dict[str, set[str]], things: list[Any]) -> None:
        super().__init__(file, 4)
        self._plain, self._things = plain, things

    def persistent_id(self, value: Any) -> int | None:
        """The number of what stays in this process."""
        kind = value if type(value) is type else type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes):
            return None
        if kind.__name__ in self._plain.get(kind.__module__, ()):
            return None
        self._things.append(value)
        return len(self._things) - 1


class Unpickler(pickle.Unpickler):
    """Reads what `Pickler` wrote."""

    def __init__(self, file: IO[bytes], things: list[Any]) -> None:
        super().__init__(file)
        self._things = things

    def persistent_load(self, number: Any) -> Any:
        """What stayed in this process."""
        return self._things[number]


def main(orders: IO[bytes], answers: IO[bytes]) -> NoReturn:
    """Load the program, then do what it is told to until it is killed."""
    plain = pickle.load(orders)
    source = pickle.load(orders)
    things: list[Any] = []

    def answer(*values: Any) -> None:
        buffer = io.BytesIO()
        Pickler(buffer, plain, things).dump(values)
        data = buffer.getvalue()
        answers.write(len(data).to_bytes(8, "big") + data)
        answers.flush()

    def told(error: BaseException) -> None:
        kind = next(k for k in type(error).__mro__ if k.__module__ == "builtins")
        answer("raised", kind.__name__, str(error)[:300])

    module = sys.modules["program"] = types.ModuleType("program")
    try:
        exec(compile(source, "program", "exec"), module.__dict__)
        names = {k: v for k, v in vars(module).items() if not k.startswith("__")}
        answer("loaded", {k: v for k, v in names.items() if type(v) is not types.ModuleType})
    except BaseException as error:
        told(error)
        os._exit(1)
    while True:
        what, thing, name, arguments, named = Unpickler(orders, things).load()
        try:
            match what:
                case "call":
                    answer("gave", thing(*arguments, **named), arguments, named)
                case "attribute":
                    answer("gave", getattr(thing, name), (), {})
                case "items":
                    answer("gave", list(thing), (), {})
                case "item":
                    answer("gave", thing[arguments[0]], (), {})
                case "length":
                    answer("gave", len(thing), (), {})
        except BaseException as error:
            told(error)


if __name__ == "__main__":
    main(os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb"))
