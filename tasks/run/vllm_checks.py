"""Whether vLLM can run a model, and computes what the train engine does, before anything starts."""

from __future__ import annotations

from configs.rollout import RolloutConfig
from engines.models.facts import ModelFacts
from engines.rollout.memory_plan import BYTES
from tasks.run.findings import PreflightError

# vllm/v1/attention/backends/cpu_attn.py of vLLM 0.32
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Kinds that see one token past their window there, and not in transformers (vLLM 0.32).
WIDER = ("cohere2",)
# What vLLM 0.32 does not do right in a weight sync, by kind of model.
UNLOADED = {
    "gpt_oss": "after a weight sync vLLM has the sinks and experts that it had before",
    "bloom": "vLLM does not take its output head in a weight sync",
}
# Of which vLLM 0.32 computes other log-probs on a CPU than transformers does, by 2 nats and more of
# small checkpoints, loaded as they are; or does not start there in float32 (DeepSeek).
OTHERWISE_ON_CPU = ("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gemma3n_text")


def check_vllm(
    rollout: RolloutConfig, facts: ModelFacts, longest: int, where: str, resumed: bool = False
) -> None:
    """Whether vLLM, with settings to be found at `where`, computes what the train engine does.

    resumed: the run was begun before a window was looked at here; its steps were made so.
    """
    if rollout.engine != "vllm":
        return
    if said := UNLOADED.get(facts.kind or ""):
        raise PreflightError(f"model_type = {facts.kind}: {said}. Set {_other(where)}.")
    beyond = facts.window is not None and longest > facts.window
    if facts.kind in WIDER and beyond and not resumed:
        raise PreflightError(
            f"model_type = {facts.kind}: vLLM has a token attend to one token more than its "
            f"window of {facts.window}, and one sequence may have {longest}. Set {_other(where)}, "
            f"or the lengths of prompts and responses so that they have {facts.window} at most."
        )
    limit = facts.rope_limit
    if limit is not None and longest > limit:
        raise PreflightError(
            f"The model has other rotary positions in sequences of more than {limit} tokens, and "
            f"vLLM has them in all where one may have {longest}. Set {_other(where)}, or the lengths "
            f"of prompts and responses so that they have {limit} at most."
        )


def _other(where: str) -> str:
    """The setting with which transformers samples or scores in vLLM's place."""
    return "rollout.engine = transformers" if where == "rollout" else f"{where}.kind = fsdp"


def check_vllm_on_cpu(rollout: RolloutConfig, facts: ModelFacts, longest: int, where: str) -> None:
    """Whether an engine on a CPU, whose settings are to be found at `where`, can run a model."""
    if rollout.engine != "vllm":
        return
    if facts.kind in OTHERWISE_ON_CPU:
        raise PreflightError(
            f"model_type = {facts.kind}: vLLM on a CPU computes other log-probs than transformers. "
            f"Set {_other(where)}."
        )
    size, heads, layers = facts.head_size, facts.kv_heads, facts.layers
    if size is not None and size not in CPU_HEAD_SIZES:
        raise PreflightError(
            f"The model's heads have {size} numbers, and vLLM on CPU takes heads of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} only. Choose another model, or set "
            f"{_other(where)}."
        )
    if facts.states:
        raise PreflightError(
            "The model's layers carry a state from token to token, which vLLM on a CPU does not "
            f"compute as the train engine does. Set {_other(where)}."
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
