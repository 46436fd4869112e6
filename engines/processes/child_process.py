"""The owner's side of a process of a user's code: start it, call it, kill it at the deadline.

A user's code may hang in native code, crash or call exit: only a process of its own can be stopped
for real and leave the worker unharmed. It is started as a fresh interpreter, which imports neither
torch nor the caller's main module, and dies with its owner.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any, Generic, TypeVar

from engines.failures import InfrastructureError
from engines.processes.process_tree import how_it_ended
from engines.processes.user_code import Broken, Packed, packed

logger = logging.getLogger(__name__)

DUMP_SECONDS = 0.05  # between looks at the stacks that a process writes before it is killed
LONGEST_DUMP = 2.0  # seconds until it has begun to: it may wait for a processor, or be stopped
ROOT = str(Path(__file__).parents[2])  # the folder that holds our packages

# The kernel's parent-death signal follows the thread that started a process, not its process:
# this thread lives as long as the interpreter, a worker's task threads do not.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="child-starter")

T = TypeVar("T")
ReadyT = TypeVar("ReadyT")  # the answer to the first message
CallT = TypeVar("CallT")
ReplyT = TypeVar("ReplyT")


def in_lasting_thread(start: Callable[[], T]) -> T:
    """Start a process that dies with this one: in a thread that lives as long."""
    return _starter.submit(start).result()


class NotStarted(InfrastructureError):
    """The process ended, or hung, before the user's code was loaded."""


class CallLost(RuntimeError):
    """The user's code never returned."""

    def __init__(self, text: str, stacks: str) -> None:
        super().__init__(text)
        self.stacks = stacks  # of the code at that moment, where it could still be asked


class CallTimedOut(CallLost):
    """The call did not end by its deadline; the process was killed."""


class ProcessDied(CallLost):
    """The process ended in the middle of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What such a process runs."""

    main: str  # module:function, called with a socket, the owner's pid and a file for stacks
    # Another interpreter, which need not have our dependencies; None: this one, which then imports
    # from where this process does.
    python: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)  # environment variables besides ours

    def command(self, arguments: str, title: str) -> list[str]:
        """Of a fresh interpreter that calls `main` with these arguments, in Python.

        title: what `ps` shows of it first.
        """
        module, _, name = self.main.rpartition(":")
        load = f"from {module} import {name}"
        if self.python is None:
            load = f"sys.path[:] = {sys.path!r}; {load}"
        else:
            # Only while ours is loaded: the folder may be the packages of this interpreter, which
            # must not stand in for what the other one lacks.
            load = f"sys.path.insert(0, {ROOT!r}); {load}; sys.path.remove({ROOT!r})"
        program = f"{title!r}; import sys; {load}; {name}({arguments})"
        python = self.python or sys.executable
        return [python, "-W", "ignore::SyntaxWarning", "-c", program]

    def variables(self) -> dict[str, str]:
        """The environment of the process; another interpreter is not told where to import from."""
        paths = {} if self.python is None else {"PYTHONPATH", "PYTHONHOME"}
        return {k: v for k, v in os.environ.items() if k not in paths} | dict(self.environ)


class ChildProcess(Generic[ReadyT, CallT, ReplyT]):
    """A user's code in a process of its own, started at need. Safe to share by threads:
    calls queue up, and a deadline counts from the moment when a call begins."""

    def __init__(
        self,
        called: str,
        program: Program,
        first: object,
        unpack: Callable[[Packed], Any],
        start_seconds: float = 180.0,
    ) -> None:
        """
        Args:
            called: what messages call the user's code, such as "reward function length".
            program: what the process runs.
            first: the message that says what to load. Answered by a ReadyT, or Broken.
            unpack: makes an answer of what arrives.
            start_seconds: deadline of that first answer.
        """
        self._called = called
        self._program = program
        self._first = first
        self._unpack = unpack
        self._start_seconds = start_seconds
        self._closed = False
        self.losses = 0  # how often its process ended by itself, and was started anew
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ready: ReadyT | None = None
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this object)

    def start(self) -> ReadyT:
        """Start the process unless it runs, and wait until the user's code is loaded.

        ValueError when it cannot be loaded; NotStarted when the process dies, twice, or is not
        ready in time, which is no fault of any sample.
        """
        with self._lock:
            return self._ensure_started()

    def call(self, call: CallT, seconds: float) -> ReplyT:
        """The answer to a message. CallTimedOut or ProcessDied when the code hangs or takes the
        process with it; the next call starts a new one. Raises as `start` does."""
        with self._lock:
            self._ensure_started()
            try:
                return self._exchange(packed(call), seconds)
            except TimeoutError:
                text = f"took longer than {seconds:.3g} s"
                raise CallTimedOut(text, self._stacks()) from None
            except (EOFError, OSError):
                end = self._end(grace=1.0)
                self.check_open()  # then it is the owner who ended it
                self._lost(end)
                raise ProcessDied(f"its process {end}", self._stacks()) from None

    def check_open(self) -> None:
        """RuntimeError if it has been closed."""
        if self._closed:
            raise RuntimeError(f"The {self._called} has been closed.")

    def running(self) -> bool:
        """Whether its process has loaded the user's code and was not seen to end."""
        return self._ready is not None

    def stop(self) -> None:
        """Kill the process between calls, and whatever it started; the next call starts anew."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """Kill the process and whatever it started, in the middle of a call too. Final."""
        self._closed = True
        process = self._process
        if process is not None and process.returncode is None:
            _kill_group(process)
        with self._lock:
            self._end()

    def _ensure_started(self) -> ReadyT:
        self.check_open()
        if self._connection is not None and self._connection.poll(0):
            # Nothing is due to arrive: the other end has closed.
            self._lost(f"{self._end(grace=1.0)} between two calls")
        if self._ready is not None:
            return self._ready
        try:
            return self._start()
        except ProcessDied as error:  # killed from outside, perhaps: one more try tells
            self.check_open()  # or by the owner, who wants none
            self._lost(str(error).removeprefix("its process "))
        try:
            return self._start()
        except ProcessDied as error:
            raise NotStarted(
                f"While the {self._called} was loaded, {error}.\n{error.stacks}".rstrip()
            ) from None

    def _lost(self, end: str) -> None:
        """Leave a trace of a process that ended by itself: what follows is tried again."""
        self.losses += 1
        logger.warning(
            "The process of the %s %s; it is started anew (%d so far).",
            self._called,
            end,
            self.losses,
        )

    def _start(self) -> ReadyT:
        title = f"refrain: {self._called}"
        spawn = partial(_spawn, self._program, title, self._dump.fileno())
        self._process, self._connection = in_lasting_thread(spawn)
        try:
            answer = self._exchange(self._first, self._start_seconds)
        except TimeoutError:
            raise NotStarted(
                f"The {self._called} was not loaded after {self._start_seconds:g} s."
            ) from None
        except (EOFError, OSError):
            end = self._end(grace=1.0)
            raise ProcessDied(f"its process {end}", self._stacks()) from None
        if isinstance(answer, Broken):
            self._end()
            raise ValueError(answer.error)
        self._ready = answer
        return answer

    def _exchange(self, message: object, seconds: float) -> Any:
        """Send a message and await the answer; TimeoutError, and the process killed, if it is late.

        A timer kills rather than a poll with a time-out: it frees every blocking step, whichever
        state the other side is in.
        """
        assert self._connection is not None and self._process is not None
        late = Event()

        def kill(process: subprocess.Popen[bytes] = self._process) -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)  # it writes down where it hangs
            self._await_stacks(process)
            _kill_group(process)

        timer = Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            self._connection.send(message)
            return self._unpack(self._connection.recv())
        except (EOFError, OSError):
            if late.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():
                self._end()

    def _await_stacks(self, process: subprocess.Popen[bytes]) -> None:
        """Return once the process has written its stacks, has ended, or takes too long for it."""
        written, give_up = 0, time.monotonic() + LONGEST_DUMP
        while not _has_ended(process) and time.monotonic() < give_up:
            time.sleep(DUMP_SECONDS)
            before, written = written, os.fstat(self._dump.fileno()).st_size
            if 0 < written == before:
                return

    def _stacks(self) -> str:
        """What the process wrote of its stacks before it ended; empty where it wrote nothing."""
        self._dump.seek(0)
        stacks = self._dump.read().decode(errors="replace").strip()
        self._dump.seek(0)
        self._dump.truncate()
        return stacks

    def _end(self, grace: float = 0.0) -> str:
        """Kill and reap the process; how it ended, for people.

        Within `grace` seconds it may still end by itself, which tells how it did.
        """
        process, connection = self._process, self._connection
        self._process = self._connection = self._ready = None
        if connection is not None:
            connection.close()
        if process is None:
            return "was closed"
        give_up = time.monotonic() + grace
        while not _has_ended(process) and time.monotonic() < give_up:
            time.sleep(0.002)
        _kill_group(process)
        return how_it_ended(process.wait())


def _spawn(program: Program, title: str, dump: int) -> tuple[subprocess.Popen[bytes], Connection]:
    owner, child = socket.socketpair()
    with child:
        process = subprocess.Popen(
            program.command(f"{child.fileno()}, {os.getpid()}, {dump}", title),
            pass_fds=[child.fileno(), dump],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=program.variables(),
        )
    return process, Connection(owner.detach())


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended; leaves it unreaped, so that its group's number stays taken."""
    try:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, options) is not None
    except ChildProcessError:  # somebody else in this process has reaped it
        return True


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill an unreaped process and all that it started in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
