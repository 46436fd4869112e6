"""A server in a process of its own, which ends with the thread that started it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from configs.overrides import ConfigError
from engines.processes.key_guard import SHORTEST_KEY
from engines.processes.parent_death import die_with_parent
from engines.processes.process_tree import kill_all, session

HEALTH_TIMEOUT = 5.0  # seconds for a server to say that it is well
FIRST_WAIT = 1.0  # seconds until a server that ended is started again
LONGEST_WAIT = 60.0  # seconds; each wait is twice the one before
STEADY = 60.0  # seconds after which a server that has run counts as well again
ASK_EVERY = 10.0  # seconds between questions to a server that runs
SILENCE = 180.0  # seconds without an answer after which it counts as hung
LARGEST_LOG = 20 * 2**20  # bytes, above which a log begins anew; the last one stays beside it


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
        connection = HTTPConnection(
            str(self._health.hostname), self._health.port, timeout=HEALTH_TIMEOUT
        )
        with contextlib.closing(connection):
            try:
                connection.request("GET", self._health.path)
                return connection.getresponse().status == HTTPStatus.OK
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


class KeptServer:
    """A server that is started again whenever it ends or hangs, after a longer wait each time."""

    def __init__(self, server: ServerProcess) -> None:
        """`server`: one that runs and answers."""
        self.server = server
        self._wait = FIRST_WAIT
        self._began = self._heard = self._asked = time.monotonic()
        self._due: float | None = None  # when it is started again
        self._away = False  # it has ended, and has not answered since

    def look(self) -> str | None:
        """Do what is due; returns a sentence where there is news, such as that it ended."""
        now = time.monotonic()
        if self._due is not None:
            if now >= self._due:
                self._due = None
                self._began = self._heard = now
                self.server.start()
            return None
        if self.server.exit_code is not None:
            return self._ended(f"ended with code {self.server.exit_code}", now)
        if now - self._asked < (0.0 if self._away else ASK_EVERY):
            return None
        self._asked = now
        self._rotate()
        if self.server.answers():
            self._heard = time.monotonic()
            away, self._away = self._away, False
            return f"The {self.server.name} server answers again." if away else None
        if now - self._heard > SILENCE:
            return self._ended(f"has not answered for {SILENCE:g} s and was killed", now)
        return None

    def _rotate(self) -> None:
        """Begin the log anew where it is large; the server writes at its end, wherever that is."""
        log = self.server.log
        if log.stat().st_size > LARGEST_LOG:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)

    def _ended(self, what: str, now: float) -> str:
        self.server.stop(0.0)  # what it had started, too
        if now - self._began > STEADY:
            self._wait = FIRST_WAIT
        wait, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
        self._due, self._away = now + wait, True
        return (
            f"The {self.server.name} server {what}; it is started again in {wait:g} s. "
            f"Its log is {self.server.log}."
        )


def check_key(variable: str, key: str) -> None:
    """ConfigError where a service's key can be guessed."""
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"The key in {variable} has {len(key)} characters, so it can be guessed. Use "
            f"{SHORTEST_KEY} or more, such as those of: openssl rand -hex 32."
        )
