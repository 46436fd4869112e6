"""Triton kernels beside plain code, in a process of its own: how Triton runs is set before its import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

CASES = "tests/engines/train/kernel_cases.py"


def cases(interpreted: bool) -> str:
    """What pytest says of the cases; raises with it where one fails."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0"}
    command = [sys.executable, "-m", "pytest", CASES, "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_compute_what_the_plain_code_does() -> None:
    assert "[100%]" in cases(interpreted=True)


@pytest.mark.gpu(1)
def test_kernels_do_on_a_gpu() -> None:
    assert torch.cuda.is_available()
    assert "[100%]" in cases(interpreted=False)
