"""Starting and ending the node process of a local cluster (engines/processes/node.py)."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from configs.terminal_text import terminal_text, without_colours
from engines.failures import ClusterLost
from engines.processes.certificates import Certificates
from engines.processes.node import AT_END_TIMEOUT, NodePlan
from engines.processes.process_setup import C_LIBRARIES
from engines.processes.process_tree import kill_all, session

STDERR = 2  # file descriptor
END_TIMEOUT = 3.0  # seconds in which the node process ends all below it and itself
# Python's helper reports what killed workers left to it as leaks, after it has cleaned up.
NO_LEAK_WARNING = "ignore::UserWarning:multiprocessing.resource_tracker"


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
