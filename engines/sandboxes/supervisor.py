"""The first process of a sandbox: it runs programs one after another, and holds them to their limits.

It is process 1 of its process namespace: what programs start and leave behind becomes its child, none
of them can kill it, and when it ends the kernel ends them all. Its owner is at the other end of its
standard input and output (engines/sandboxes/opening.py); when the owner goes, it goes.

Loaded within the sandbox: only the standard library is imported.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import resource
import selectors
import signal
import stat
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, NoReturn

from engines.sandboxes.protocol import WORK, received, send
from engines.sandboxes.system_calls import (
    filter_system_calls,
    forbid_new_rights,
    hide_memory,
    is_hidden,
)

LOOK = 0.02  # seconds between looks at the memory of all processes
PIECE = 2**16
PIPE = 4096  # bytes that a pipe takes at once
PAGE = os.sysconf("SC_PAGE_SIZE")
OPEN_FILES = 256
EXPOSED = (
    "in this sandbox programs could look into their supervisor, and so make up what they came to: "
    "its runtime does not heed PR_SET_DUMPABLE, as some versions of gVisor. Use another runtime"
)
NOT_STARTED = 127  # exit code where there is no such program, as of a shell
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # the same program, the same score
    # A pool of threads as large as the machine's cores would use up the limits at its start.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


def main(setup: dict[str, Any]) -> NoReturn:
    """Serve until the owner is gone.

    setup: "limits", as SandboxLimits; "user": id that programs get, None for that of this process;
    "ours": processes of that user in the namespace that are no program's.
    """
    # It kills all processes that it can see: never where those are not a sandbox's.
    if os.getpid() != 1:
        send(1, {"failed": "the supervisor is not process 1 of a process namespace of its own"})
        os._exit(1)
    hide_memory()
    if not is_hidden(setup["user"]):
        send(1, {"failed": EXPOSED})
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 does not die of
    orders, answers = os.dup(0), os.dup(1)  # closed at exec: no program gets them
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number, inheritable=True)
    os.makedirs(WORK, exist_ok=True)
    if setup["user"] is not None:
        os.chown(WORK, setup["user"], setup["user"])
    os.chdir(WORK)
    send(answers, {"ready": True})
    serving = _Supervisor(setup, orders)
    while True:
        try:
            order = received(lambda size: os.read(orders, size))
        except EOFError:
            os._exit(0)  # and with it all that is left in the namespace
        try:
            answer = serving.obey(order)
        except ValueError as error:
            answer = {"refused": str(error)}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        send(answers, answer)


@dataclass(slots=True)
class _Output:
    """What a program wrote to one descriptor, as far as it is kept."""

    limit: int
    data: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def add(self, piece: bytes) -> None:
        room = self.limit - len(self.data)
        self.data += piece[:room]
        self.truncated |= len(piece) > room


class _Supervisor:
    def __init__(self, setup: dict[str, Any], orders: int) -> None:
        self._limits = limits = setup["limits"]
        self._user = setup["user"]
        self._ours = setup["ours"]
        self._orders = orders
        self._memory = limits["memory_mib"] * 2**20

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """The answer to an order; ValueError where the order cannot be carried out."""
        if order["do"] == "write":
            self._write(order["path"], base64.b64decode(order["data"]))
            return {}
        if order["do"] == "read":
            return {"data": _text(self._read(order["path"], order["limit"]))}
        return self._execute(order["argv"], base64.b64decode(order["stdin"]), order["timeout"])

    def _write(self, path: str, data: bytes) -> None:
        place = _inside(path)
        try:
            existing = os.path.dirname(place)
            while not os.path.lexists(existing):
                existing = os.path.dirname(existing)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "wb", opener=_no_link) as file:
                file.write(data)
            while self._user is not None and place != existing:
                os.chown(place, self._user, self._user, follow_symlinks=False)
                place = os.path.dirname(place)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None

    def _read(self, path: str, limit: int) -> bytes:
        try:
            with open(_inside(path), "rb", opener=_no_link) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ValueError(f"{path} is no file")
                return file.read(limit)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None

    def _execute(self, argv: list[str], stdin: bytes, timeout: float) -> dict[str, Any]:
        started = time.monotonic()
        inputs, outputs, errors, faults = os.pipe(), os.pipe(), os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become(argv, inputs[0], outputs[1], errors[1], faults[1])
        for descriptor in (inputs[0], outputs[1], errors[1], faults[1]):
            os.close(descriptor)
        limit = self._limits["output_kib"] * 1024
        streams = {outputs[0]: _Output(limit), errors[0]: _Output(limit)}
        try:
            cause = self._watch(pid, inputs[1], stdin, streams, started + timeout)
            status = _end_all(pid)
            for descriptor, output in streams.items():  # what it wrote last
                while piece := _read_now(descriptor):
                    output.add(piece)
        finally:
            _end_all(pid)
            fault = _read_now(faults[0])
            for descriptor in (*streams, faults[0]):
                os.close(descriptor)
        if fault:
            raise RuntimeError(f"the program could not be confined: {fault.decode()}")
        code = os.waitstatus_to_exitcode(status)
        if cause is None and code == -signal.SIGXCPU:
            cause = "timed_out"
        elif cause is None:
            cause = "ended" if code >= 0 else "killed"
        return {
            "cause": cause,
            "exit_code": code if cause == "ended" else None,
            "signal": -code if code < 0 else None,
            "stdout": _text(bytes(streams[outputs[0]].data)),
            "stderr": _text(bytes(streams[errors[0]].data)),
            "truncated": any(output.truncated for output in streams.values()),
            "seconds": time.monotonic() - started,
        }

    def _watch(
        self, pid: int, stdin: int, data: bytes, streams: dict[int, _Output], deadline: float
    ) -> str | None:
        """Feed a program and take its output until it ends: None, or the cause to end it."""
        rest = memoryview(data)
        os.set_blocking(stdin, False)
        ended = _ending_of(pid)
        with selectors.DefaultSelector() as selector:
            for descriptor in streams:
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(stdin, selectors.EVENT_WRITE)
            if ended is not None:
                selector.register(ended, selectors.EVENT_READ)
            selector.register(self._orders, selectors.EVENT_READ)
            next_look = time.monotonic()
            try:
                while True:
                    now = time.monotonic()
                    if now >= deadline:
                        return "timed_out"
                    if now >= next_look:
                        next_look = now + LOOK
                        if ended is None and _has_ended(pid):
                            return None
                        if _memory(self._memory) > self._memory:
                            return "out_of_memory"
                    ready = selector.select(min(next_look, deadline) - now)
                    for key, _ in ready:
                        descriptor = key.fd
                        if descriptor == ended:
                            return None
                        if descriptor == self._orders:
                            os._exit(0)  # nothing is due from the owner but its end
                        if descriptor == stdin:
                            rest = _feed(stdin, rest)
                            if not rest:
                                selector.unregister(stdin)
                                os.close(stdin)
                                stdin = -1
                            continue
                        piece = _read_now(descriptor)
                        streams[descriptor].add(piece)
                        if not piece:
                            selector.unregister(descriptor)
            finally:
                if ended is not None:
                    os.close(ended)
                if stdin >= 0:
                    os.close(stdin)

    def _become(
        self, argv: list[str], stdin: int, stdout: int, stderr: int, faults: int
    ) -> NoReturn:
        """Turn this process, just forked, into the program.

        What the machine could not do is told through `faults`, which is closed at exec: without it
        the exit would count as the program's own.
        """
        try:
            self._confine(stdin, stdout, stderr)
        except BaseException:
            os.write(faults, traceback.format_exc()[-PIPE:].encode())
            os._exit(NOT_STARTED)
        try:
            os.execvpe(argv[0], argv, ENVIRONMENT)
        except OSError as error:
            os.write(2, f"{argv[0]} was not started: {error}\n".encode())
        finally:
            os._exit(NOT_STARTED)

    def _confine(self, stdin: int, stdout: int, stderr: int) -> None:
        """Give this process the limits of a program."""
        os.setsid()
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, number, inheritable=True)
        _offer_to_the_kernel()
        for limit, value in self._rlimits().items():
            hard = resource.getrlimit(limit)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (most, most))
        # The first signal at the limit says why, the second, a second later, cannot be caught.
        cpu = self._limits["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
        if self._user is not None:
            os.setgroups([])
            os.setresgid(self._user, self._user, self._user)
            os.setresuid(self._user, self._user, self._user)
        forbid_new_rights()
        filter_system_calls()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
            signal.signal(ignored, signal.SIG_DFL)

    def _rlimits(self) -> dict[int, int]:
        return {
            resource.RLIMIT_AS: self._memory,
            # Of one user within a user namespace (Linux 5.14).
            resource.RLIMIT_NPROC: self._limits["processes"] + self._ours,
            resource.RLIMIT_FSIZE: self._limits["disk_mib"] * 2**20,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }


def _ending_of(pid: int) -> int | None:
    """What can be read once a child has ended; None where there is no such thing, as in gVisor."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return None


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _offer_to_the_kernel() -> None:
    """Have this process killed first where the machine itself is short of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _inside(path: str) -> str:
    """The absolute path of a file below the working folder. No program runs while this is asked."""
    place = os.path.join(WORK, path)
    folder = os.path.realpath(os.path.dirname(place))
    if f"{folder}/".startswith(f"{WORK}/") and os.path.basename(place) not in ("", ".", ".."):
        return os.path.join(folder, os.path.basename(place))
    raise ValueError(f"{path} is not below the working folder")


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


def _feed(descriptor: int, rest: memoryview) -> memoryview:
    """What is left after writing as much as fits; nothing where nobody reads any more."""
    try:
        return rest[os.write(descriptor, rest[:PIECE]) :] if rest else rest
    except BlockingIOError:
        return rest
    except BrokenPipeError:
        return rest[:0]


def _read_now(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, PIECE)
    except BlockingIOError:
        return b""


def _memory(limit: int) -> int:
    """Bytes of memory of all processes but this one.

    Pages that several have are counted once for each, and properly only where that exceeds `limit`:
    it takes longer.
    """
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    rough = sum(_resident(pid) for pid in pids)
    return rough if rough <= limit else sum(_proportional(pid) for pid in pids)


def _resident(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:  # it has ended
        return 0


def _proportional(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except ProcessLookupError:
        return 0
    except OSError:  # hidden, or it has ended
        return _resident(pid)
    return 0


def _end_all(pid: int) -> int:
    """Kill and reap every process but this one; the exit status of `pid`, which may be reaped."""
    status = 0
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            ended, exit_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if ended == pid:
            status = exit_status


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
