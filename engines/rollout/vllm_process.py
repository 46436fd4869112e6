"""How vLLM lives and dies inside a worker: its thread, its child processes, its log.

vLLM runs its model in child processes. They are started from the thread kept here, which lives
until `close`, because they die with the thread that started them (engines/rollout/vllm_plugin.py).
Every coroutine runs beside a watch on those processes, so that a dead engine is an error and not a
hang.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from prometheus_client import REGISTRY, Metric
from prometheus_client.registry import Collector

from engines.processes.process_setup import lasting_folder
from engines.processes.process_tree import descendants, exit_code, how_it_ended, kill_all
from engines.rollout.contract import EngineDead
from engines.rollout.vllm_plugin import OWNER_VARIABLE
from engines.start_progress import reporting_growth

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

T = TypeVar("T")

# vLLM is given so long to end its processes itself, in seconds; then they are killed.
CLOSE_GRACE = 1.0

# Children find what is theirs in this process's environment: one start at a time.
_starting = threading.Lock()
_LOG_PREFIX = re.compile(r"^(\([^)]*\) )?(ERROR|INFO|WARNING) \S+ \S+ \[[^\]]*\] ?")
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b(:|$)")


class VllmProcess:
    """An AsyncLLM on a thread and event loop of its own."""

    def __init__(
        self, name: str, arguments: Callable[[], AsyncEngineArgs], environment: Mapping[str, str]
    ) -> None:
        """Start vLLM; `arguments` is called on the engine's thread, after vLLM's import.

        environment: of its processes alone, beside this one's. Raises EngineDead with vLLM's own
        cause if it does not start.
        """
        self.name = name
        self.cause = ""
        self.closed = False
        self._llm: AsyncLLM | None = None
        self._collectors: list[Collector] = []
        self.log = Path(tempfile.mkdtemp(prefix="refrain-vllm-")) / f"{name}.log"
        self._children: list[psutil.Process] = []
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"{name}-vllm", daemon=True)
        self._died = asyncio.Event()
        self._thread.start()
        atexit.register(self.close)
        try:
            with reporting_growth([self.log], "starting vLLM, whose log has", self.log):
                self._submit(self._start(arguments, environment))
        except BaseException:
            self.close()
            raise

    @property
    def llm(self) -> AsyncLLM:
        """vLLM; EngineDead if it is closed or did not start."""
        if self._llm is None:
            raise self.dead()
        return self._llm

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that were started for this engine and live."""
        return tuple(child.pid for child in self._children if _alive(child))

    @property
    def requests(self) -> Mapping[str, RequestState]:
        """Requests in flight, as vLLM's output side sees them."""
        return {} if self._llm is None else dict(self._llm.output_processor.request_states)

    def metrics(self) -> list[Metric]:
        """What vLLM counts and measures, under its own names; nothing without its log_stats."""
        return [metric for collector in self._collectors for metric in collector.collect()]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` on the engine's loop; EngineDead if vLLM dies first."""
        if self.closed or self.cause:
            work.close()
            raise self.dead()
        return self._submit(self._watched(work))

    def dead(self) -> EngineDead:
        """The error that says why this engine cannot be used."""
        return EngineDead(f"rollout engine {self.name} {self.cause or 'is closed'}")

    def close(self) -> None:
        """End vLLM and every process that it started, within seconds. May be called again."""
        with self._closing:
            if self.closed:
                return
            self.closed = True
            atexit.unregister(self.close)
            below = [process for child in self._children for process in descendants(child.pid)]
            self._children = list({*self._children, *below})
            if self._llm is not None:
                self._llm.shutdown(timeout=CLOSE_GRACE)
                self._llm = None
            kill_all(self._children)
            psutil.wait_procs(self._children, timeout=CLOSE_GRACE)
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(CLOSE_GRACE)
            shutil.rmtree(self.log.parent, ignore_errors=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError:
            raise self.dead() from None

    async def _start(
        self, arguments: Callable[[], AsyncEngineArgs], environment: Mapping[str, str]
    ) -> None:
        """Start vLLM's processes from this thread and watch the engine's core."""
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.utils import CoreEngineProcManager

        owner = {OWNER_VARIABLE: f"{os.getpid()}:{self.log}"}
        with _starting, _inherited({**environment, **owner}):
            try:
                self._llm = AsyncLLM.from_engine_args(arguments())
                self._collectors = _vllm_collectors() if self._llm.log_stats else []
            except RuntimeError as error:
                self.cause = f"did not start: {self._last_error() or error}"
                self._keep_log()
                raise self.dead() from error
        # The children log to a file, and what goes wrong here is raised: no word of vLLM's besides.
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        manager = self.llm.engine_core.resources.engine_manager
        assert isinstance(manager, CoreEngineProcManager), "the core is a process of this machine"
        for process in manager.processes:
            child = psutil.Process(process.pid)
            self._children += [child, *descendants(child.pid)]
            self._loop.add_reader(process.sentinel, self._on_death, process)

    def _on_death(self, process: Any) -> None:
        """vLLM's core ended: say why, and end every wait."""
        self._loop.remove_reader(process.sentinel)
        if self.closed or self.cause:
            return
        how = how_it_ended(exit_code(process))
        reason = self._last_error()
        self.cause = f"is dead: its process {process.pid} {how}" + (
            f" ({reason})" if reason else ""
        )
        self._keep_log()
        self._died.set()

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, abandoned with EngineDead when the engine's core dies."""
        task = asyncio.ensure_future(work)
        died = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
            failed = task.done() and not task.cancelled() and task.exception()
            if failed and self.llm.errored:
                # vLLM may learn of its death before the watch does.
                await asyncio.wait({died}, timeout=2.0)
                self.cause = self.cause or f"is dead: {failed}"
            if failed and self.cause:
                raise self.dead() from failed
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
            raise self.dead()
        finally:
            died.cancel()

    def _keep_log(self) -> None:
        """Put what vLLM's processes wrote where it stays, and say so in the cause."""
        if self.log.exists():
            log = lasting_folder() / f"{self.name}-{os.getpid()}.log"
            shutil.copyfile(self.log, log)
            self.cause += f"; its log is {log}"

    def _last_error(self) -> str:
        """The root error in the engine's log, where vLLM's processes write their tracebacks."""
        if not self.log.exists():
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        plain = [_LOG_PREFIX.sub("", line) for line in lines]
        errors = [line for line in plain if _ERROR_LINE.match(line)]
        return _root_cause(errors)


def _vllm_collectors() -> list[Collector]:
    """Of the engine that started last: vLLM takes those of another one out of the registry."""
    registered = list(REGISTRY._collector_to_names.items())  # as vLLM finds its own (vLLM 0.32)
    return [
        collector
        for collector, names in registered
        if any(name.startswith("vllm:") for name in names)
    ]


@contextlib.contextmanager
def _inherited(environment: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started in the body have these variables too."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _root_cause(errors: list[str]) -> str:
    """The first error of a log that is not vLLM's report of an earlier one."""
    echoes = ("EngineDeadError", "See stack trace", "Worker failed with error", "root cause above")
    for line in errors:
        if not any(echo in line for echo in echoes):
            return line
    return errors[0] if errors else ""


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
