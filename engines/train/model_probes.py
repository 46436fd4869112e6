"""What child processes say of a model's config.json, in a line of JSON that is kept for next time.

Such as the sizes of a model of any kind, as its code makes them (engines/train/tracing.py). Imports
neither torch nor transformers, as the child does.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

from configs.environment import cache_folder
from configs.lora import LoraConfig
from configs.process import private_folder
from engines import models
from engines.models.traced_shape import TracedShape

LIMIT = 300.0  # seconds; most take less than ten
LEAST = 8  # tokens of a sequence that is gone through
MOST = 1024  # tokens of a sequence that is gone through; memory of longer ones follows
TRACING_LIMIT = 120.0  # seconds
T = TypeVar("T")


class BrokeOff(Exception):
    """The child said nothing; why, as the end of a sentence that begins with what it was to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedChild(Generic[T]):
    """A module that is run with a model's directory and more arguments, and prints what it finds."""

    module: str
    read: Callable[[str], T]  # of the line; ValueError, TypeError or KeyError for any other
    directory: Path  # of the model
    arguments: tuple[str, ...] = ()
    folder: str  # of what was said before, below the cache folder
    limit: float = LIMIT  # seconds

    @contextmanager
    def begun(self) -> Iterator[Callable[[], T]]:
        """Begin it; what is given waits for what it says, or raises BrokeOff. Ends with the body."""
        stored = self._stored()
        if stored is not None:
            yield lambda: stored
            return
        process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(self.directory), *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

        def wait() -> T:
            try:
                out, err = process.communicate(timeout=self.limit)
            except subprocess.TimeoutExpired as error:
                raise BrokeOff(f"had not ended after {self.limit:.0f} s") from error
            try:
                result = self.read(line := out.splitlines()[-1])
            except (ValueError, TypeError, KeyError, IndexError) as error:
                last = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                raise BrokeOff(f"broke off ({last[:200]})") from error
            self._store(line)
            return result

        try:
            yield wait
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()

    def _store(self, line: str) -> None:
        folder = self._folder()
        if folder is None:
            return
        try:
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
                file.write(line)
            os.replace(file.name, folder / self._name())
        except OSError:  # no room: it is asked again
            pass

    def _stored(self) -> T | None:
        folder = self._folder()
        try:
            return None if folder is None else self.read((folder / self._name()).read_text())
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _folder(self) -> Path | None:
        """Where lines are kept; None where another user could have written them."""
        try:
            return private_folder(cache_folder() / self.folder)
        except (OSError, RuntimeError):  # no cache folder, or no home that it could be in
            return None

    def _name(self) -> str:
        """By the model's config, the arguments, the libraries, and our code that computes with it."""
        digest, rooms = hashlib.sha256(), (Path(__file__).parent, Path(models.__file__).parent)
        code = sorted(file for room in rooms for file in room.rglob("*.py"))
        for part in (self.directory / "config.json", *code):
            digest.update(hashlib.sha256(part.read_bytes()).digest())
        of = (*self.arguments, version("torch"), version("transformers"))
        digest.update(" ".join(of).encode())
        return f"{digest.hexdigest()[:32]}.json"


def traced_shape(
    directory: Path, longest: int, products: str, lora: LoraConfig | None = None
) -> TracedShape:
    """Of the model of a directory, by a child that takes about ten seconds; then by what it said.

    longest: tokens of the longest sequence that is read. products: their format, as
    train.compute_dtype has it. lora: an adapter that is trained alone.
    Raises BrokeOff where the code cannot be gone through without the weights, or not in time.
    """
    settings = () if lora is None else (lora.model_dump_json(exclude={"alpha"}),)
    answer = _ask_once(directory, min(max(longest, LEAST), MOST), products, *settings)
    if isinstance(answer, str):
        raise BrokeOff(answer)
    return answer


@cache
def _ask_once(directory: Path, longest: int, products: str, *lora: str) -> TracedShape | str:
    """Once in a process, for a plan asks many times; why not, where the child broke off."""
    child = CachedChild(
        module="engines.train.tracing",
        read=lambda line: TracedShape.from_json(json.loads(line)),
        directory=directory,
        arguments=(str(longest), products, *lora),
        folder="shapes",
        limit=TRACING_LIMIT,
    )
    with child.begun() as results:
        try:
            return results()
        except BrokeOff as error:
            return str(error)
