"""The self-test of a model before it trains: run in a child process, its verdict cached.

A small model of the same config by the train engine and by transformers' own forward pass.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from configs.environment import cache_folder
from configs.private_folder import private_folder
from engines.train.self_test.verdict import Verdict

LIMIT = 300.0  # seconds; most take less than ten


@contextmanager
def self_test(directory: Path, longest: int) -> Iterator[Callable[[], Verdict]]:
    """Begin the self-test of a model; what is given waits for the verdict. Ends with the body.

    Args:
        directory: Of the model's files, of which config.json is read.
        longest: Tokens of the longest sample.
    """
    kept = _kept(directory, longest)
    if kept is not None:
        yield lambda: kept
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "engines.train.self_test.child", str(directory), str(longest)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def wait() -> Verdict:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return Verdict(untested=f"its self-test had not ended after {LIMIT:.0f} s")
        try:
            told = Verdict.from_json(out.splitlines()[-1])
        except (ValueError, TypeError, KeyError, IndexError):
            last = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            return Verdict(untested=f"its self-test broke off ({last[:200]})")
        _keep(directory, longest, told)
        return told

    try:
        yield wait
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def _kept(directory: Path, longest: int) -> Verdict | None:
    folder = _folder()
    try:
        if folder is None:
            return None
        return Verdict.from_json((folder / _name(directory, longest)).read_text())
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(directory: Path, longest: int, verdict: Verdict) -> None:
    folder = _folder()
    if folder is None:
        return
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(verdict.to_json())
        os.replace(file.name, folder / _name(directory, longest))
    except OSError:  # no room: it is tested again
        pass


def _folder() -> Path | None:
    """Where verdicts are kept; None where another user could have written them."""
    try:
        return private_folder(cache_folder() / "self-tests")
    except (OSError, RuntimeError):  # no cache folder, or no home that it could be in
        return None


def _name(directory: Path, longest: int) -> str:
    """By the model's config, the length, the libraries, and the code of the train engine."""
    digest = hashlib.sha256()
    code = sorted(Path(__file__).parents[1].rglob("*.py"))
    for part in (directory / "config.json", *code):
        digest.update(hashlib.sha256(part.read_bytes()).digest())
    digest.update(f"{longest} {version('torch')} {version('transformers')}".encode())
    return f"{digest.hexdigest()[:32]}.json"
