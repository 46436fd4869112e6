"""An engine in a process of its own, below the worker that holds it.

Two engines of one worker that are busy at the same time share an interpreter lock: while one
launches kernels, the other's threads wait up to five milliseconds each time that they have something
to do.

The process dies with its worker. When it ends by itself, the calls in flight and all later ones raise
what the owner makes of how it ended.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

from configs.imports import imported_class
from engines.failures import Failure, capture, revive
from engines.processes.child_process import in_lasting_thread
from engines.processes.parent_death import die_with_parent
from engines.processes.process_setup import name_in_ps
from engines.processes.process_tree import exit_code, how_it_ended, kill_tree
from engines.start_progress import current_listener, heard_by
from engines.workers.engine import Engine
from storage.objects.usage import COUNTER, LATENCIES, Latency, Usage

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

BUILD = "build"
AT_ONCE = 1024  # calls in flight; each has a thread, which waits
CLOSE_GRACE = 3.0  # seconds for the engine to close; then its processes are killed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    number: int
    method: str  # of the engine, or BUILD
    arguments: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """What a call in flight is at."""

    number: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    number: int
    value: Any = None
    failure: Failure | None = None
    version: int | None = None  # policy version that the engine holds
    usage: Usage = field(default_factory=Usage)  # of the store, since the process began
    latencies: Mapping[str, Latency] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """Who waits for an answer."""

    answer: Future[Any]
    heard: Callable[[str], None] | None  # takes the call's reports


class OwnProcess:
    """An engine in a process of its own. Its methods may be called from any thread."""

    def __init__(
        self,
        name: str,
        cls: str,
        payload: object,
        dead: Callable[[str], Exception],
    ) -> None:
        """Start the process and build the engine in it.

        Args:
            name: Of the process, for `ps`; 15 bytes are shown.
            cls: Import path of the engine's class.
            payload: Its one argument; picklable.
            dead: The error of a call that the process did not outlive, by how it ended.
        """
        self.version: int | None = None  # policy version that the engine held at its last answer
        self.cause = ""  # how the process ended; empty while it lives
        self.closed = False
        self._dead = dead
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._lock = threading.Lock()  # held while something is sent
        self._closing = threading.Lock()
        self._counted: tuple[Usage, Mapping[str, Latency]] = Usage(), {}
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(
            target=serve, args=(there, os.getpid(), name), name=name, daemon=False
        )
        in_lasting_thread(self._process.start)
        there.close()
        self.pid: int = self._process.pid or 0
        self._listener = threading.Thread(target=self._listen, name=f"{name}-answers", daemon=True)
        self._listener.start()
        atexit.register(self.close)
        try:
            self._ask(BUILD, {"cls": cls, "payload": payload})
        except BaseException:
            self.close()
            raise

    def call(
        self, method: Callable[Concatenate[Any, P], R], /, *nothing: P.args, **arguments: P.kwargs
    ) -> R:
        """What a method of the engine returns, or its exception; arguments are given by name."""
        assert not nothing, f"{method.__name__}: arguments are given by name"
        value: R = self._ask(method.__name__, arguments)
        return value

    def close(self) -> None:
        """Close the engine, and end the process and all below it, within seconds."""
        with self._closing:
            if self.closed:
                return
            self.closed = True
            atexit.unregister(self.close)
            with suppress(Exception):
                self._send("close", {}).result(CLOSE_GRACE)
            if self._process.is_alive():
                kill_tree(self.pid)
            self._listener.join(CLOSE_GRACE)
            self._connection.close()

    def _ask(self, method: str, arguments: Mapping[str, object]) -> Any:
        if self.closed:
            raise self._dead(self.cause or "is closed")
        return self._send(method, arguments).result()

    def _send(self, method: str, arguments: Mapping[str, object]) -> Future[Any]:
        number, answer = next(self._numbers), Future[Any]()
        self._waiting[number] = _Waiting(answer=answer, heard=current_listener())
        try:
            with self._lock:
                self._connection.send(_Call(number=number, method=method, arguments=arguments))
        except OSError:  # the process has ended
            self._listener.join()
            self._end_waits()  # the listener may have gone by before this call was there
        except BaseException:  # an argument that cannot be sent
            self._waiting.pop(number, None)
            raise
        return answer

    def _listen(self) -> None:
        """Hand out what the process says until it ends; then end every wait."""
        try:
            while True:
                self._hear(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("An answer of process %d cannot be read; it is killed.", self.pid)
            kill_tree(self.pid)
        code = exit_code(self._process)
        if not self.closed:
            self.cause = f"is dead: its process {self.pid} {how_it_ended(code)}"
        self._end_waits()

    def _end_waits(self) -> None:
        with suppress(KeyError):
            while True:
                _, waiting = self._waiting.popitem()
                waiting.answer.set_exception(self._dead(self.cause or "is closed"))

    def _hear(self, said: _Answer | _Phase) -> None:
        if isinstance(said, _Phase):
            waiting = self._waiting.get(said.number)
            if waiting is not None and waiting.heard is not None:
                waiting.heard(said.text)
            return
        self.version = said.version
        usage, latencies = self._counted
        self._counted = said.usage, said.latencies
        more = said.usage - usage
        COUNTER.add(more.requests, more.bytes_read, more.bytes_written)
        LATENCIES.add({k: v - latencies.get(k, Latency()) for k, v in said.latencies.items()})
        answer = self._waiting.pop(said.number).answer
        if said.failure is None:
            answer.set_result(said.value)
        else:
            answer.set_exception(revive(said.failure, f"in process {self.pid}"))


def serve(connection: Connection, owner: int, name: str) -> None:
    """Answer the owner's calls, each in a thread, until it is gone: the process's own side."""
    name_in_ps(name)
    die_with_parent(owner)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the owner, which closes it
    served = _Served(connection)
    threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="call")
    with suppress(EOFError, OSError):
        while True:
            threads.submit(served.answer, connection.recv())
    os._exit(0)  # the owner is gone: nobody waits for what still runs


class _Served:
    """The engine of this process, and what it answers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._engine: Engine | None = None
        self._lock = threading.Lock()  # held while something is sent

    def answer(self, call: _Call) -> None:
        """Run a call and send what comes of it."""
        make = partial(_Answer, number=call.number)
        try:
            with heard_by(lambda phase: self._send_phase(call.number, phase)):
                value = self._run(call)
            self._send(partial(make, value=value))
        except (Exception, SystemExit) as error:
            self._send(partial(make, failure=capture(error)))

    def _run(self, call: _Call) -> object:
        if call.method == BUILD:
            self._engine = _built(**call.arguments)  # type: ignore[arg-type]
            return None
        assert self._engine is not None, "it is built first"
        return getattr(self._engine, call.method)(**call.arguments)

    def _send(self, answer: Callable[..., _Answer]) -> None:
        with self._lock, suppress(OSError):  # what is counted here grows from answer to answer
            self._connection.send(
                answer(
                    version=None if self._engine is None else self._engine.version,
                    usage=COUNTER.total(),
                    latencies=LATENCIES.total(),
                )
            )

    def _send_phase(self, number: int, text: str) -> None:
        with self._lock, suppress(OSError):
            self._connection.send(_Phase(number=number, text=text))


def _built(cls: str, payload: object) -> Engine:
    engine: Engine = imported_class(cls)(payload)
    return engine
