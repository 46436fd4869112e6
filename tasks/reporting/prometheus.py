"""How a run's metrics get to Prometheus: by a file, at a port of its own, to a push gateway.

The file, which `refrain exporter` reads, stays when the run has ended or died, so that its series go
on, and say so. All three have the same metrics. Nothing here holds a step: looks, files and pushes
have a thread of their own.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    generate_latest,
    push_to_gateway,
    start_http_server,
)
from prometheus_client.exposition import basic_auth_handler, default_handler

from configs.environment import push_gateway_login
from configs.overrides import ConfigError
from configs.storage import TrackingConfig
from engines.failures import ClusterLost
from tasks.reporting.exporter import SUFFIX
from tasks.reporting.machinery_metrics import MachineryMetrics
from tasks.reporting.run_metrics import RunMetrics, WithLabels, labels_of
from tasks.run.events import Event, Listeners, Note, RunBegan, RunEnded
from tasks.run.facts import RunFacts
from tasks.run.machinery import Machinery

KEPT = 7 * 24 * 3600.0  # seconds for which the file of a run that is over stays
PUSH_TIMEOUT = 10.0  # seconds
JOB = "refrain"  # of what is pushed
ENDING = 15.0  # seconds for the last look, file and push of a run that ends


class LiveMetrics:
    """The metrics of one run, from where a flow run has it to where it leaves it."""

    def __init__(self, facts: RunFacts, tell: Callable[[Event], object]) -> None:
        """`tell`: of what cannot be written or sent, once."""
        self._config: TrackingConfig = facts.config.tracking
        self._run, self._tell = facts.name, tell
        self.events = RunMetrics(facts.config.steps, facts.config.max_staleness)
        self.machinery = MachineryMetrics()
        self.events.registry.register(self.machinery)
        self.registry = CollectorRegistry()
        labels = labels_of(facts, os.uname().nodename)
        self.registry.register(WithLabels(self.events.registry, labels))
        self._said = set[str]()
        self._served = contextlib.ExitStack()

    def listen(self, listeners: Listeners) -> None:
        """Hear what the run says; nobody is told of anything before a flow run has it."""
        self.events.listen(listeners)
        listeners.on(RunBegan, self.run_began)
        listeners.on(RunEnded, lambda event: self._served.close())

    def run_began(self, event: RunBegan) -> None:
        """From here on the metrics can be read. ConfigError where the port cannot be opened."""
        self._served.enter_context(self.served())
        if self._config.metrics_every:
            self._served.enter_context(self.looking(event.look))

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """During the body the metrics are served, where the settings name a port. ConfigError."""
        port, host = self._config.prometheus_port, self._config.prometheus_host
        if port is None:
            yield
            return
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigError(
                f"tracking.prometheus_port = {port} cannot be opened on {host} ({error.strerror}). "
                "Set it to a port that is free."
            ) from error
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    @contextlib.contextmanager
    def looking(self, look: Callable[[], Machinery | None]) -> Iterator[None]:
        """During the body, look, write the file and push every so often; and once more at its end."""
        ended = threading.Event()

        def watch() -> None:
            self._forget_old_files()
            while not ended.is_set():
                self._look(look)
                ended.wait(self._config.metrics_every)
            self._look(look)  # once more, and that the run has ended

        thread = threading.Thread(target=watch, name="metrics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(ENDING)

    def _look(self, look: Callable[[], Machinery | None]) -> None:
        seen = None
        # A cluster that ends is told by the run itself; the metrics go on with what they had.
        with contextlib.suppress(ClusterLost, TimeoutError, OSError):
            seen = look()
        self.machinery.update(seen, time.time())
        self._publish()

    def _publish(self) -> None:
        try:
            write_metrics(Path(self._config.metrics_folder), self._run, self.registry)
        except OSError as error:
            self._warn(
                f"The metrics cannot be written to tracking.metrics_folder = "
                f"{self._config.metrics_folder} ({error.strerror}); the run goes on without."
            )
        gateway = self._config.push_gateway
        if gateway is None:
            return
        try:
            push(gateway, self._run, self.registry)
        except (OSError, ValueError) as error:
            self._warn(f"tracking.push_gateway = {gateway} does not take the metrics ({error}).")

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._tell(Note(text=text, warning=True))

    def _forget_old_files(self) -> None:
        """Those of runs that have been over for long, as far as they are this user's."""
        for path in Path(self._config.metrics_folder).glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > KEPT:
                    path.unlink()


def write_metrics(folder: Path, run: str, registry: CollectorRegistry) -> Path:
    """Put the metrics into the folder, at once or not at all; whoever may list it may read them."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{run}-")
    try:
        with open(handle, "wb") as file:
            file.write(generate_latest(registry))
            os.fchmod(file.fileno(), 0o600 | (folder.stat().st_mode & 0o044))
        path = folder / f"{run}{SUFFIX}"
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def push(gateway: str, run: str, registry: CollectorRegistry) -> None:
    """Put the metrics in place of the run's earlier ones. OSError where they are not taken."""
    login = push_gateway_login()

    def handler(
        url: str,
        method: str,
        timeout: float | None,
        headers: list[tuple[str, str]],
        data: bytes,
    ) -> Callable[[], None]:
        if login is None:
            return default_handler(url, method, timeout, headers, data)
        return basic_auth_handler(url, method, timeout, headers, data, *login)

    push_to_gateway(gateway, JOB, registry, {"run": run}, PUSH_TIMEOUT, handler)
