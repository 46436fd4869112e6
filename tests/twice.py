"""pytest in several processes, and then in one for the few tests that failed beside others.

Several processes of tests on two busy cores make some wait for longer than they allow. A failure that
stays fails the run. One that goes away is named, so that it is mended. Both runs print pytest's own
closing lines.

The processes share the cores: threads of OpenMP that wait for a core which another process has cost a
sixth of all the processors' time.

    python -m tests.twice PROCESSES [arguments of pytest]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

MOST = 8  # failures that may be due to what ran beside them
LAST = Path(".pytest_cache/v/cache/lastfailed")  # as pytest keeps them


def main(processes: str, arguments: Sequence[str], most: int = MOST) -> int:
    """The exit code of the first run, or of the second where there is one."""
    LAST.unlink(missing_ok=True)
    beside = ("-n", processes, "--dist", "loadfile", "--no-loadscope-reorder")
    share = max(1, (os.cpu_count() or 1) // int(processes))
    code = _pytest(*beside, *arguments, environment={"OMP_NUM_THREADS": str(share)})
    if code != pytest.ExitCode.TESTS_FAILED or not LAST.exists():
        return code
    failed = sorted(json.loads(LAST.read_text()))
    if len(failed) > most:
        return code
    print(f"Failed beside other tests, and run once more alone: {', '.join(failed)}", flush=True)
    return _pytest("--last-failed", "--last-failed-no-failures", "none", *arguments)


def _pytest(*arguments: str, environment: Mapping[str, str] | None = None) -> int:
    """`environment`: what is not set otherwise."""
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(
        command, env={**(environment or {}), **os.environ}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
