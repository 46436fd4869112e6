"""A server in a process of its own, which ends with the thread that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from engines.processes.parent_death import die_with_parent
from engines.processes.process_tree import kill_all, session

HEALTH_TIMEOUT = 5.0  # seconds for a server to say that it is well


class ServerError(RuntimeError):
    """A server did not come up, or ended."""


class ServerProcess:
    """How a server is started, asked how it is, and stopped. It may be started again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        health: str,
        log: Path,
    ) -> None:
        """`environment`: all of it; `health`: URL that answers with success when it is well."""
        self.name = name
        self.log = log
        self._command = command
        self._environment = environment
        self._health = urlsplit(health)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; `wait` tells when it answers."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, and we still talk to the server
                preexec_fn=die_with_parent,
            )

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs, or before it was started."""
        return None if self._process is None else self._process.poll()

    def answers(self) -> bool:
        """Whether it says that it is well."""
        # On this machine: by no proxy. httpx would take three times as long for one request.
        asked = HTTPConnection(
            str(self._health.hostname), self._health.port, timeout=HEALTH_TIMEOUT
        )
        with contextlib.closing(asked):
            try:
                asked.request("GET", self._health.path)
                return asked.getresponse().status == HTTPStatus.OK
            except (OSError, HTTPException):
                return False

    def wait(self, timeout: float) -> None:
        """Return when it answers; ServerError when it ends, or after so many seconds."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if self.exit_code is not None:
                raise ServerError(
                    f"The {self.name} server ended with code {self.exit_code}. "
                    f"Its log is {self.log}."
                )
            if self.answers():
                return
            time.sleep(0.1)
        raise ServerError(
            f"The {self.name} server did not answer within {timeout:g} s. Its log is {self.log}."
        )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and what it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def stop(self, timeout: float) -> int | None:
        """End it and what it started, by force after so many seconds; its exit code."""
        if self._process is None:
            return None
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.send(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
                break
        kill_all(session(self._process.pid))  # children that did not end with it
        return self._process.wait()
