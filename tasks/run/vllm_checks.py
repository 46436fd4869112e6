"""Whether vLLM on a CPU can run a model, before anything starts."""

from __future__ import annotations

from configs.rollout import RolloutConfig
from engines.models.facts import ModelFacts
from engines.rollout.memory_plan import BYTES
from tasks.run.findings import PreflightError

# vllm/v1/attention/backends/cpu_attn.py of vLLM 0.32
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_vllm_on_cpu(rollout: RolloutConfig, facts: ModelFacts, longest: int, where: str) -> None:
    """Whether an engine on a CPU, whose settings are to be found at `where`, can run a model."""
    if rollout.engine != "vllm":
        return
    other = "rollout.engine = transformers" if where == "rollout" else f"{where}.kind = fsdp"
    size, heads, layers = facts.head_size, facts.kv_heads, facts.layers
    if size is not None and size not in CPU_HEAD_SIZES:
        raise PreflightError(
            f"The model's heads have {size} numbers, and vLLM on CPU takes heads of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} only. Choose another model, or set "
            f"{other}."
        )
    if facts.window is not None or size is None or heads is None or layers is None:
        return
    needed = 2 * layers * heads * size * BYTES[rollout.dtype] * longest / 2**30
    if needed > rollout.kv_cache_gib:
        raise PreflightError(
            f"{where}.kv_cache_gib = {rollout.kv_cache_gib:g}, but the keys and values of "
            f"one sample of {longest} tokens take {needed:.3g} GiB. "
            f"Set {where}.kv_cache_gib higher."
        )
