"""How much memory an engine that samples will take, from the model's shape and the settings.

Without torch. On a GPU vLLM takes the share of it that it is given, loads its weights, and has what
is left of the share for keys and values. Not counted: its activations, its graphs, CUDA's context.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.lora import LoraConfig
from configs.rollout import RolloutConfig
from engines.models.traced_shape import Shape, adapter_parameters
from engines.weight_transfer.offer import BUFFERS, PIECE, UNHASHED

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BLOCK = 16  # tokens; vLLM hands out keys and values in blocks of so many
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has tables of adapters
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
    weights: int  # bytes of the model, and of tables for its adapter, on this GPU
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


def vllm_share(
    rollout: RolloutConfig, shape: Shape, longest: int, gpu: int, lora: LoraConfig | None = None
) -> VllmShare:
    """Of a GPU with so many bytes.

    Args:
        rollout: Settings of the engine.
        shape: Of its model.
        longest: Tokens of a sample.
        gpu: Bytes.
        lora: Adapters that it loads beside its base; None: none.
    """
    return VllmShare(
        whole=int(rollout.gpu_memory_utilization * gpu),
        weights=weights_bytes(rollout, shape) + adapter_bytes(rollout, shape, lora),
        token=shape.cached_numbers(rollout.tensor_parallel_size) * BYTES[rollout.dtype],
        longest=-(-longest // BLOCK) * BLOCK,
    )


def weights_bytes(rollout: RolloutConfig, shape: Shape) -> int:
    """The model on each device; the output head is a weight of its own, tied or not."""
    tables = 2 * shape.vocabulary * shape.hidden
    inside = shape.parameters - (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    return BYTES[rollout.dtype] * (inside + tables) // rollout.tensor_parallel_size


def adapter_rank(rank: int) -> int:
    """The rank of the tables in which vLLM holds an adapter of a rank."""
    return min(each for each in ADAPTER_RANKS if each >= rank)


def adapter_bytes(rollout: RolloutConfig, shape: Shape, lora: LoraConfig | None) -> int:
    """The tables of the one adapter that vLLM loads at a time, were no device to have a part."""
    if lora is None:
        return 0
    tables = lora.model_copy(update={"rank": adapter_rank(lora.rank)})
    return BYTES[rollout.dtype] * adapter_parameters(shape, tables)


def transfer_bytes(rollout: RolloutConfig, shape: Shape) -> int:
    """What comes of a version at once on each device, where the trainer sends it.

    Tensors come whole, and pieces of those that follow beside them.
    """
    if rollout.weight_transfer == "store":
        return 0
    return BUFFERS * PIECE + UNHASHED + BYTES[rollout.dtype] * shape.largest


def engine_bytes(
    rollout: RolloutConfig,
    shape: Shape,
    samples: int,
    longest: int,
    lora: LoraConfig | None = None,
) -> dict[str, int]:
    """What an engine holds by holder, but for vLLM on GPUs (`vllm_share`).

    Args:
        rollout: Its settings.
        shape: Its model's.
        samples: That it has under way at once.
        longest: Tokens of one of them at most.
        lora: Adapters that it loads beside its base; None: none.
    """
    weights = weights_bytes(rollout, shape) + adapter_bytes(rollout, shape, lora)
    if rollout.engine == "vllm":
        return {"weights": weights, "keys and values": int(rollout.kv_cache_gib * GIB)}
    longest = 1 << (longest - 1).bit_length()  # a row's room is doubled as it grows
    each = (longest * shape.cached_numbers() + shape.state) * BYTES[rollout.dtype]
    return {"weights": weights, "keys and values": samples * each}
