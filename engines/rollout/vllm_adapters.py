"""A version's adapter in vLLM's own layers for adapters, beside a base that stays as it is.

Runs inside vLLM's worker processes. One adapter is loaded at a time, under one number: requests in
flight go on under the next version as they do under merged weights, and the salt of a request keeps
cached keys and values apart by version. What vLLM multiplies by is read back, all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from engines.failures import WeightMismatch

if TYPE_CHECKING:
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    from storage.runs.weights import Adapter

# Of every request of an engine that takes adapters; the path is vLLM's to look at where it has none.
REQUEST = LoRARequest("policy", 1, "loaded by Refrain")


def load(
    worker: LRUCacheWorkerLoRAManager, factors: Mapping[str, Tensor], adapter: Adapter | None
) -> None:
    """Have requests computed with these factors besides, by PEFT's names; with none: the base alone.

    B is scaled in float32 and rounded once, as A is, to the number format of the model. Raises
    WeightMismatch naming a layer of which vLLM holds other numbers afterwards; then the base is left.
    """
    manager = worker._adapter_manager
    worker.remove_all_adapters()
    if adapter is None:
        _load_none(worker)
        return
    config = PEFTHelper(r=adapter.rank, lora_alpha=adapter.rank, target_modules=[])
    # vLLM scales in place, in its own format.
    scaled = {
        name: each.float() * (adapter.scale if ".lora_B." in name else 1.0)
        for name, each in factors.items()
    }
    dtype = manager.lora_config.lora_dtype
    assert isinstance(dtype, torch.dtype), "vLLM has taken the model's"
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        REQUEST.lora_int_id,
        scaled,
        config,
        device="cpu",
        dtype=dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    expected = {
        name: (each.lora_a.clone(), each.lora_b.clone()) for name, each in lora.loras.items()
    }
    try:
        manager.add_adapter(lora)
        manager.activate_adapter(REQUEST.lora_int_id)
        check_held(manager, expected)
    except Exception:
        worker.remove_all_adapters()
        _load_none(worker)
        raise


def _load_none(worker: LRUCacheWorkerLoRAManager) -> None:
    worker.add_dummy_lora(REQUEST, rank=1)
    worker._adapter_manager.activate_adapter(REQUEST.lora_int_id)


def check_held(manager: LoRAModelManager, wanted: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """WeightMismatch unless vLLM's layers hold what is wanted and no more, and have a place for all.

    Args:
        wanted: A [rank, in] and B [out, rank] by the layer's name, in the format and scale of vLLM's.
    """
    slot = manager.lora_index_to_id.index(REQUEST.lora_int_id)
    remaining = set(wanted)
    for path, layer in manager.modules.items():
        parts = manager.packed_modules.get(path, [path])
        if len(parts) != len(layer.lora_a_stacked):
            raise _other(path)
        pairs = [wanted.get(part) for part in parts]
        a, b = (
            _share(layer, [None if pair is None else pair[k] for pair in pairs], k) for k in (0, 1)
        )
        for table, part in zip(
            (*layer.lora_a_stacked, *layer.lora_b_stacked), (*a, *b), strict=True
        ):
            if not _holds(table[slot, 0], part):
                raise _other(path)
        remaining.difference_update(parts)
    if remaining:
        raise _other(min(remaining))


def _share(layer: BaseLayerWithLoRA, whole: list[Tensor | None], which: int) -> list[Tensor | None]:
    """What a rank has of a layer's factors, A (0) or B (1)."""
    if layer.tp_size == 1 or not any(factor is not None for factor in whole):
        return whole
    cut = layer.slice_lora_b if which else layer.slice_lora_a
    if len(whole) > 1:
        return list(cut(whole))
    return [None if factor is None else cut(factor) for factor in whole]


def _holds(held: Tensor, wanted: Tensor | None) -> bool:
    """Whether a table has `wanted` in its first rows and columns, and zeros besides."""
    expected = torch.zeros_like(held)
    if wanted is not None:
        rows, columns = wanted.shape
        if rows > held.shape[0] or columns > held.shape[1]:
            return False
        expected[:rows, :columns] = wanted.to(held.device)
    return torch.equal(held, expected)


def _other(layer: str) -> WeightMismatch:
    return WeightMismatch(
        f"vLLM holds other numbers than the adapter's for the layer that it calls {layer}, or has no "
        "place for them. Set lora.serving = merged."
    )
