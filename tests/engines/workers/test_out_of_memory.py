"""Want of memory told from other errors, and the sentence for it."""

import errno

import pytest
import torch

from configs.rollout import RolloutConfig
from engines.failures import OutOfMemory
from engines.rollout.contract import EngineDead, setting_for_less
from engines.workers.engine import described, memory_that_ran_out, memory_watched
from tests.engines.workers.dummies import Dummy, Payload


def too_large():
    torch.empty(2**50, dtype=torch.uint8)


def fork_refused():
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_torchs_own_error_of_the_host_is_known():
    with pytest.raises(RuntimeError) as caught:
        too_large()
    assert memory_that_ran_out(caught.value) == "host"


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), "device"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (
            EngineDead("did not start: torch.OutOfMemoryError: CUDA out of memory. Tried"),
            "device",
        ),
        (
            EngineDead(
                "did not start: ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup "
                "is less than desired GPU memory utilization (0.85, 67.3 GiB)."
            ),
            "device",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("Connection closed by peer"), None),
        (EngineDead("its process 7 was killed by SIGKILL"), None),
        (KeyError("memory"), None),
    ],
)
def test_which_memory(error, memory):
    assert memory_that_ran_out(error) == memory


def test_the_sentence_names_call_memory_and_setting_and_other_errors_pass():
    with (
        pytest.raises(OutOfMemory, match=r"^x\.y on w-1 ran out of host memory\. Give its pool"),
        memory_watched("x.y on w-1", Payload(), lambda: Dummy(Payload())),
    ):
        too_large()
    with (
        pytest.raises(OutOfMemory, match=r"^x\.build on w-1 ran out of host memory\."),
        memory_watched("x.build on w-1", Payload(), lambda: Dummy),
    ):
        fork_refused()
    with (
        pytest.raises(ValueError, match="^other$"),
        memory_watched("x.y on w-1", Payload(), lambda: Dummy),
    ):
        raise ValueError("other")


def test_holders_are_named_by_size_and_empty_ones_not():
    sizes = {"weights": 3 * 2**30, "gradients": 0, "pass": 61 * 2**30, "moments": 5 * 2**20}
    assert described(sizes) == "pass 61.0 GiB, weights 3.0 GiB, moments 5 MiB"


@pytest.mark.parametrize(
    ("engine", "memory", "said", "setting"),
    [
        ("transformers", "device", "CUDA out of memory", "rollout.max_sequences lower than 64"),
        ("vllm", "host", "can't allocate memory", "rollout.kv_cache_gib lower than 2"),
        ("vllm", "device", "CUDA out of memory", "gpu_memory_utilization lower than 0.85"),
        ("vllm", "device", "larger than the available KV cache", "utilization higher than 0.85"),
    ],
)
def test_a_rollout_engine_names_the_setting_of_its_memory(engine, memory, said, setting):
    config = RolloutConfig(engine=engine, dtype="float32")
    assert setting in setting_for_less(config, memory, said)
