"""What Refrain adds to every process of vLLM, through the entry point `vllm.general_plugins`.

Everywhere: the weight-transfer engine named `fsspec`. In the processes that a VllmEngine started,
besides: they die with their parent, what they print goes to the engine's log file, and on a CPU the
norm is a fused kernel (engines/rollout/vllm_cpu_kernels.py), log-probs of drawn tokens are kept in
arrays (engines/rollout/vllm_logprobs.py), and a turn's grammar begins where the turn was left
(engines/rollout/vllm_grammars.py). Nothing else changes for a vLLM that merely lives in the same
environment.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

from engines.processes.parent_death import die_with_parent

# Set by VllmEngine while it starts its processes, "PID:LOG FILE": an environment variable because
# vLLM hands its children nothing else that a plugin could read.
OWNER_VARIABLE = "REFRAIN_VLLM_OWNER"
TRANSFER_BACKEND = "fsspec"

_registered = False


def register() -> None:
    """Called by vLLM in the starting process, in its engine process and in its workers."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        TRANSFER_BACKEND, "engines.rollout.vllm_weight_loading", "StoreTransferEngine"
    )
    owner, _, log = os.environ.get(OWNER_VARIABLE, "").partition(":")
    if owner:
        from engines.rollout import vllm_grammars, vllm_logprobs

        vllm_logprobs.register()
        vllm_grammars.register()
        _register_cpu_kernels()
    if owner and int(owner) != os.getpid():
        # vLLM's engine loop waits for requests, not for its parent: it would outlive a killed Dask
        # worker and keep its memory (https://github.com/vllm-project/vllm/issues/55510; not needed
        # once https://github.com/vllm-project/vllm/pull/55846 is in). The signal follows the
        # parent's *thread*, so VllmProcess starts vLLM on one that lives as long as the engine.
        parent = multiprocessing.parent_process()
        die_with_parent(None if parent is None else parent.pid)
        _write_to(log)


def _register_cpu_kernels() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from engines.rollout import vllm_cpu_kernels as vllm_cpu

        vllm_cpu.register()


def _write_to(log: str) -> None:
    """Send standard output and error, C++ libraries' included, to the end of the file `log`."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    vllm = logging.getLogger("vllm")
    vllm.setLevel(logging.INFO)
    for handler in vllm.handlers:
        handler.setLevel(logging.INFO)
