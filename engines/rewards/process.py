"""The owner's side of a reward process: start it, call it, kill it at the deadline.

A user's function may hang in native code, crash or call exit: only a process of its own can be
stopped for real and leave the worker unharmed. It is started as a fresh interpreter, which
imports neither torch nor the caller's main module, and dies with its owner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import Event, Lock, Timer

from engines.failures import InfrastructureError
from engines.rewards.protocol import (
    Broken,
    Message,
    Packed,
    Ready,
    Reply,
    RewardCall,
    Start,
    packed,
    unpacked,
)

DUMP_SECONDS = 0.05  # in which a process that hangs writes its stacks before it is killed

# The kernel's parent-death signal follows the thread that started a process, not its process:
# this thread lives as long as the interpreter, a worker's task threads do not.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-starter")


class NotStarted(InfrastructureError):
    """The process of a reward function ended, or hung, before its function was loaded."""


class CallLost(RuntimeError):
    """The function never returned."""

    def __init__(self, text: str, stacks: str) -> None:
        super().__init__(text)
        self.stacks = stacks  # of the function at that moment, where it could still be asked


class CallTimedOut(CallLost):
    """The call did not end by its deadline; the process was killed."""


class ProcessDied(CallLost):
    """The process ended in the middle of a call."""


class RewardProcess:
    """One reward function in a process of its own, started at need. Safe to share by threads:
    calls queue up, and a deadline counts from the moment when a call begins."""

    def __init__(self, start: Start, start_seconds: float = 180.0) -> None:
        self.name = start.name
        self._start_message = start
        self._start_seconds = start_seconds
        self._closed = False
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ready: Ready | None = None
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this object)

    def start(self) -> Ready:
        """Start the process unless it runs, and wait until its function is loaded.

        ValueError when the function cannot be loaded; NotStarted when the process dies, twice, or
        is not ready in time, which is no fault of any sample.
        """
        with self._lock:
            return self._ensure_started()

    def call(self, call: RewardCall, seconds: float) -> Reply:
        """Score samples. CallTimedOut or ProcessDied when the function hangs or takes the process
        with it; the next call starts a new one. Raises as `start` does."""
        with self._lock:
            self._ensure_started()
            try:
                reply = self._exchange(packed(call), seconds)
            except TimeoutError:
                text = f"took longer than {seconds:.3g} s"
                raise CallTimedOut(text, self._stacks()) from None
            except (EOFError, OSError):
                end = self._end(grace=1.0)
                self._refuse_closed()  # then it is the owner who ended it
                raise ProcessDied(f"its process {end}", self._stacks()) from None
            assert isinstance(reply, Reply)
            return reply

    def close(self) -> None:
        """Kill the process and whatever it started, in the middle of a call too. Final."""
        self._closed = True
        process = self._process
        if process is not None and process.returncode is None:
            _kill_group(process)
        with self._lock:
            self._end()

    def _ensure_started(self) -> Ready:
        self._refuse_closed()
        if self._connection is not None and self._connection.poll(0):
            self._end()  # nothing is due to arrive: the other end has closed
        if self._ready is not None:
            return self._ready
        try:
            return self._start()
        except ProcessDied:  # killed from outside, perhaps: one more try tells
            pass
        try:
            return self._start()
        except ProcessDied as error:
            raise NotStarted(
                f"While the reward function {self.name} was loaded, {error}.\n{error.stacks}".rstrip()
            ) from None

    def _start(self) -> Ready:
        self._process, self._connection = _starter.submit(_spawn, self._dump.fileno()).result()
        try:
            answer = self._exchange(self._start_message, self._start_seconds)
        except TimeoutError:
            raise NotStarted(
                f"The reward function {self.name} was not loaded after {self._start_seconds:g} s."
            ) from None
        except (EOFError, OSError):
            end = self._end(grace=1.0)
            raise ProcessDied(f"its process {end}", self._stacks()) from None
        if isinstance(answer, Broken):
            self._end()
            raise ValueError(answer.error)
        assert isinstance(answer, Ready)
        self._ready = answer
        return answer

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"The reward function {self.name} has been closed.")

    def _exchange(self, message: Start | Packed, seconds: float) -> Message:
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
            time.sleep(DUMP_SECONDS)
            _kill_group(process)

        timer = Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            self._connection.send(message)
            return unpacked(self._connection.recv())
        except (EOFError, OSError):
            if late.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():
                self._end()

    def _stacks(self) -> str:
        """What the process wrote of its stacks before it ended; empty where it wrote nothing."""
        self._dump.seek(0)
        found = self._dump.read().decode(errors="replace").strip()
        self._dump.seek(0)
        self._dump.truncate()
        return found

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
        code = process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _spawn(dump: int) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    with theirs:
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from engines.rewards.child import main; "
            f"main({theirs.fileno()}, {os.getpid()}, {dump})"
        )
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore::SyntaxWarning", "-c", program],
            pass_fds=[theirs.fileno(), dump],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, Connection(ours.detach())


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
