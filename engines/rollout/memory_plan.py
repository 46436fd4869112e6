"""How much memory an engine that samples will take, from the model's shape and the settings.

Without torch. On a GPU vLLM takes the share of it that it is given, loads its weights, and has what
is left of the share for keys and values. Not counted: its activations, its graphs, CUDA's context.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.rollout import RolloutConfig
from engines.models.traced_shape import Shape

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BLOCK = 16  # tokens; vLLM hands out keys and values in blocks of so many
# Of rollout.engine_args, those that change what a GPU holds in a way that is not planned here.
UNPLANNED = (
    "block_size",
    "cpu_offload_gb",
    "kv_cache_dtype",
    "pipeline_parallel_size",
    "quantization",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmShare:
    """What vLLM takes of each of its GPUs, and what it has of it for keys and values."""

    whole: int  # bytes: gpu_memory_utilization of the GPU's memory
    weights: int  # bytes of the model on this GPU
    token: int  # bytes of a token's keys and values on this GPU
    longest: int  # tokens of the longest sample, in whole blocks

    @property
    def keys_and_values(self) -> int:
        """Bytes; none where the weights alone are more than the share."""
        return max(0, self.whole - self.weights)

    @property
    def tokens(self) -> int:
        """Of which it can hold keys and values."""
        return self.keys_and_values // self.token

    @property
    def samples(self) -> int:
        """Longest samples for which there is room; without room for one it cannot start."""
        return self.tokens // self.longest

    @property
    def least(self) -> int:
        """Bytes of a share in which one longest sample fits."""
        return self.weights + self.longest * self.token


def vllm_share(rollout: RolloutConfig, shape: Shape, longest: int, gpu: int) -> VllmShare:
    """Of a GPU with so many bytes; longest: tokens of a sample."""
    return VllmShare(
        whole=int(rollout.gpu_memory_utilization * gpu),
        weights=weights_bytes(rollout, shape),
        token=shape.cached_numbers(rollout.tensor_parallel_size) * BYTES[rollout.dtype],
        longest=-(-longest // BLOCK) * BLOCK,
    )


def weights_bytes(rollout: RolloutConfig, shape: Shape) -> int:
    """The model on each device; the output head is a weight of its own, tied or not."""
    tables = 2 * shape.vocabulary * shape.hidden
    inside = shape.parameters - (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    return BYTES[rollout.dtype] * (inside + tables) // rollout.tensor_parallel_size


def engine_bytes(
    rollout: RolloutConfig, shape: Shape, samples: int, longest: int
) -> dict[str, int]:
    """What an engine holds by holder, but for vLLM on GPUs (`vllm_share`).

    Args:
        rollout: Its settings.
        shape: Its model's.
        samples: That it has under way at once.
        longest: Tokens of one of them at most.
    """
    weights = weights_bytes(rollout, shape)
    if rollout.engine == "vllm":
        return {"weights": weights, "keys and values": int(rollout.kv_cache_gib * GIB)}
    longest = 1 << (longest - 1).bit_length()  # a row's room is doubled as it grows
    each = (longest * shape.cached_numbers() + shape.state) * BYTES[rollout.dtype]
    return {"weights": weights, "keys and values": samples * each}
