"""The node process: Dask's scheduler and one nanny per worker, apart from the flow process.

With workers as jobs it has the scheduler only; on a machine behind SSH, nannies only.

The flow process starts it (NodeProcess), writes a NodePlan as one line to its standard
input, reads the scheduler's address as one line from its standard output, and keeps the input open
for as long as it lives: end of file means that the flow process is gone, however it died, and then
everything below this process is killed. It leads a session of its own, so that Ctrl-C in the
terminal reaches the flow process alone, and it adopts the orphans of killed workers and ends them.

Why not in the flow process, as Dask's LocalCluster has it: workers started from there import the
user's main module, Prefect included; the scheduler competes with the flow's threads; and what a
killed worker leaves behind has nobody to clean it up.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import multiprocessing
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any, NoReturn

import dask
import psutil
from pydantic import BaseModel, ConfigDict

from configs.environment import import_from_working_folder
from configs.process import begin_process, close_to_others
from configs.terminal_text import terminal_text, without_colours
from engines.failures import ClusterLost
from engines.processes import dask_settings
from engines.processes.dask_settings import Certificates
from engines.processes.parent_death import adopt_orphans, wake_at_parents_death
from engines.processes.process_setup import C_LIBRARIES, keep_temporary_files_in, name_in_ps
from engines.processes.process_tree import descendants, kill_all, session

LOOPBACK = "127.0.0.1"
WORKER_IMAGE = "engines.workers.worker_image"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
# Variables of a worker that have their effect also after the engines' libraries were imported:
# worker_image.dask_setup sees to the first two.
READ_LATER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", VISIBLE_GPUS, "TOKENIZERS_PARALLELISM")
OF_VLLM = "VLLM_"  # which is not imported before
DEAD = psutil.STATUS_ZOMBIE
KILL_TIMEOUT = 2.0  # seconds for which killing goes on while processes appear
SWEEP = 0.5  # seconds between looks for orphans
AT_END_TIMEOUT = 10.0  # seconds that a command at the end may take
STDERR = 2  # file descriptor
END_TIMEOUT = 3.0  # seconds in which the node process ends all below it and itself
# Python's helper reports what killed workers left to it as leaks, after it has cleaned up.
NO_LEAK_WARNING = "ignore::UserWarning:multiprocessing.resource_tracker"


class WorkerPlan(BaseModel):
    """One worker process."""

    model_config = ConfigDict(frozen=True)

    name: str
    pool: str
    slots: int  # engine calls at once
    env: dict[str, str]  # set before any engine library is imported


class NodePlan(BaseModel):
    """What a node process starts."""

    model_config = ConfigDict(frozen=True)

    no_workers_timeout: float  # seconds
    workers: tuple[WorkerPlan, ...]
    host: str | None = LOOPBACK  # address to listen at; none: the one that reaches the scheduler
    scheduler: str | None = None  # address of a scheduler elsewhere; none: start one
    certificates: Certificates | None = None  # for TLS
    dashboard: str | None = None  # HOST:PORT of the scheduler's own dashboard; none: off
    # Commands that end what runs elsewhere for the cluster.
    at_end: tuple[tuple[str, ...], ...] = ()
    # Modules of engines that workers are forked with, where they may.
    preload: tuple[str, ...] = ()

    @property
    def preloaded(self) -> tuple[str, ...]:
        """Modules imported before workers are forked.

        None of `preload` where a worker has a GPU, since no library may look for it in the process
        that is forked, or where a worker has variables that a library may read when it is imported.
        """
        names = {name for worker in self.workers for name in worker.env}
        late = all(name in READ_LATER or name.startswith(OF_VLLM) for name in names)
        gpus = any(worker.env.get(VISIBLE_GPUS) for worker in self.workers)
        return (WORKER_IMAGE, *(self.preload if late and not gpus else ()))


def start_fork_server(modules: Sequence[str] = (WORKER_IMAGE,)) -> set[int]:
    """Start the process that workers are forked from; returns the pids of Python's helpers.

    It imports Dask once for all workers, in parallel with this process: a worker starts in 0.1 s
    instead of 2 s. The engines' libraries take 7 s of CPU, once instead of in each worker.
    """
    if len(modules) > 1:  # then no worker has a GPU, and no library may open one here
        os.environ[VISIBLE_GPUS] = ""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    forkserver.ensure_running()
    return {child.pid for child in psutil.Process().children()}


class Node:
    """The running node process."""

    def __init__(self, plan: NodePlan, scratch: str, address_fd: int, helpers: set[int]) -> None:
        """`scratch`: folder of this cluster alone, removed at the end; `address_fd`: where the
        scheduler's address goes; `helpers`: pids of Python's helpers.
        """
        self.plan = plan
        self.scratch = scratch
        self.address_fd = address_fd
        self.helpers = helpers
        self.nannies: list[Any] = []  # distributed.Nanny, which is imported later

    def end(self, status: int) -> NoReturn:
        """Kill everything below this process, clean up and end it."""
        for nanny in self.nannies:
            nanny.close_gracefully()  # start no new workers
        for command in self.plan.at_end:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, timeout=AT_END_TIMEOUT, check=False, capture_output=True)
        silence = os.open(os.devnull, os.O_WRONLY)  # nobody needs to read what Dask makes of it
        os.dup2(silence, sys.stderr.fileno())
        until = time.monotonic() + KILL_TIMEOUT
        clear = 0
        while clear < 2 and time.monotonic() < until:
            clear = 0 if kill_all(descendants(os.getpid())) else clear + 1
            time.sleep(0.02)
        shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(status)

    def watch_parent(self) -> None:
        """Wait in threads until the flow process is gone, by either sign of it."""
        parent = os.getppid()

        def by_pipe() -> None:
            while sys.stdin.buffer.readline():
                pass
            self.end(0)

        def by_pid() -> None:  # a forked child of the flow process may hold the pipe open
            while os.getppid() == parent:
                time.sleep(SWEEP)
            self.end(0)

        threading.Thread(target=by_pipe, name="parent pipe", daemon=True).start()
        threading.Thread(target=by_pid, name="parent pid", daemon=True).start()

    async def sweep(self) -> None:
        """Kill what dead workers left behind: adopted children that this process did not start."""
        me = psutil.Process()
        while True:
            await asyncio.sleep(SWEEP)
            children = me.children()
            if any(child.pid in self.helpers and child.status() == DEAD for child in children):
                raise RuntimeError("the process that workers are forked from has died")
            orphans = [child for child in children if child.pid not in self.helpers]
            kill_all(orphans)
            for orphan in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan.pid, os.WNOHANG)

    async def serve(self) -> None:
        """Run the scheduler and the nannies."""
        dask_settings.apply()
        dask.config.set({"distributed.scheduler.no-workers-timeout": self.plan.no_workers_timeout})
        from distributed import Nanny, Scheduler  # reads the settings
        from distributed.comm import get_address_host
        from distributed.utils import get_ip

        secured = self.plan.certificates
        connection: dict[str, Any] = {}
        if secured is not None:
            connection = {"protocol": "tls", "security": secured.security()}
        address, host = self.plan.scheduler, self.plan.host
        if address is None:
            assert host is not None
            # Dask opens an HTTP port even without a dashboard: keep it, too, from the network.
            scheduler = await Scheduler(
                host=host,
                port=0,
                dashboard=self.plan.dashboard is not None,
                dashboard_address=self.plan.dashboard or f"{LOOPBACK}:0",
                **connection,
            )
            address = scheduler.address
        else:
            host = host or get_ip(get_address_host(address))
        os.write(self.address_fd, f"{address}\n".encode())
        os.close(self.address_fd)
        self.nannies = [
            Nanny(
                address,
                name=worker.name,
                nthreads=worker.slots + 1,  # one thread beside the slots, for small things
                resources={worker.pool: worker.slots},
                env=worker.env,
                memory_limit=0,
                local_directory=self.scratch,
                silence_logs="ERROR",
                host=host,
                dashboard_address=f"{LOOPBACK}:0",
                preload=[WORKER_IMAGE],
                **connection,
            )
            for worker in self.plan.workers
        ]
        await asyncio.gather(self.sweep(), *self.nannies)


def main() -> None:
    """Serve until the flow process ends. The argument, if any, is the cluster's scratch folder."""
    begin_process()
    close_to_others()
    import_from_working_folder()
    scratch = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="refrain-")
    keep_temporary_files_in(scratch)
    name_in_ps("refrain node")
    adopt_orphans()
    wake_at_parents_death()  # to see it, and end
    # Not inherited, unlike standard output, which is everybody's from here on, for people to read.
    address_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    plan = NodePlan.model_validate(json.loads(sys.stdin.buffer.readline()))
    helpers = start_fork_server(plan.preloaded)
    node = Node(plan, scratch, address_fd, helpers)
    node.watch_parent()
    try:
        asyncio.run(node.serve())
    except BaseException:
        traceback.print_exc()
    node.end(1)


if __name__ == "__main__":
    main()


class NodeProcess:
    """The node process of this flow process."""

    def __init__(
        self,
        plan: NodePlan,
        start_timeout: float,
        command: Sequence[str] | None = None,
        output: Path | None = None,
    ) -> None:
        """Start it and wait (at most `start_timeout` seconds) until its scheduler listens.

        The workers follow. `command` starts it on another machine, and passes its streams on.
        `output`: a file that gets what it and all below it print, beside our standard error.
        """
        self._scratch = tempfile.mkdtemp(prefix="refrain-")
        self._certificates = plan.certificates
        if command is None:
            module = ["-m", "engines.processes.node", self._scratch]
            # -P: a user's own engines/ in the working folder must not hide ours.
            command = [sys.executable, "-P", "-W", NO_LEAK_WARNING, *module]
        self._end_timeout = END_TIMEOUT + AT_END_TIMEOUT * len(plan.at_end)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the flow process, which then ends this one
            env={
                **C_LIBRARIES,
                **os.environ,
                # What can be imported here can be imported on the workers.
                "PYTHONPATH": python_path(),
                # The image that workers are forked from must have no thread pools.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            },
        )
        copied = (self._process.stderr, output)
        self._copying = threading.Thread(target=_pass_on, args=copied, daemon=True)
        self._copying.start()
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died at once; said below
                self._process.stdin.write(json.dumps(plan.model_dump()).encode() + b"\n")
                self._process.stdin.flush()
            self.address = self._read_address(start_timeout)
        except BaseException:
            self.end()
            raise

    def _read_address(self, timeout: float) -> str:
        """The line that the node process writes when its scheduler listens."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise ClusterLost(f"the Dask scheduler did not start within {timeout:g} s")
        line = self._process.stdout.readline().decode().strip()
        if not line:
            status = self._process.wait(END_TIMEOUT)
            raise ClusterLost(f"the Dask scheduler did not start (exit status {status})")
        return line

    @property
    def pid(self) -> int:
        """Process id; also that of the session which all workers belong to."""
        return self._process.pid

    def certificate_files(self) -> Certificates | None:
        """The certificates of its cluster as files of this user, which go when it ends."""
        if self._certificates is None:
            return None
        return self._certificates.as_files(Path(self._scratch, "tls"))

    def exit_status(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it: it kills all below it when its input closes. Make sure of that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._end_timeout)
        if self._process.returncode != 0:  # it hangs, or was killed itself and could not clean up
            kill_all(session(self._process.pid))
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._copying.join(END_TIMEOUT)
        shutil.rmtree(self._scratch, ignore_errors=True)


def _pass_on(stream: IO[bytes], output: Path | None) -> None:
    """Copy a stream to our standard error and to a file's end, until all who write to it are gone.

    Functions of users print what models wrote, so it is made safe for a terminal.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with contextlib.ExitStack() as opened:
        opened.enter_context(stream)
        file = None
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            file = opened.enter_context(output.open("ab", buffering=0))
        while data := os.read(stream.fileno(), 65536):
            lines = without_colours(decoder.decode(data)).replace("\r\n", "\n").replace("\r", "\n")
            safe = terminal_text(lines).encode()
            if file is not None:
                file.write(safe)
            with contextlib.suppress(OSError):  # nobody reads ours any more
                os.write(STDERR, safe)


def python_path() -> str:
    """The folders that modules are imported from here."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
