"""Low-rank adapters as PEFT stores them, and the whole weights that a version of them means.

An adapted linear layer computes x W^T + s (x A^T) B^T with s = alpha / rank (Hu et al., 2021,
arXiv:2106.09685); its merged weight is W + s B A. W [out, in] is of the base, A [rank, in] and
B [out, rank] are of the adapter. Of a weight that has those of E experts, [E, out, in] or transposed,
each expert has its own A and B: PEFT has them in one A [E rank, in], expert after expert, and one
B [out, rank E], whose columns begin with the first column of each expert.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.failures import WeightMismatch
from storage.objects.store import Store
from storage.runs.weights import (
    Adapter,
    BaseVersion,
    Manifest,
    StackedWeight,
    TensorEntry,
    WeightsRef,
    open_manifest,
    stream,
)

if TYPE_CHECKING:
    import torch

    from configs.lora import LoraConfig
    from configs.model import PretrainedModel
    from storage.objects.node_cache import NodeCache

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT's, before the name in the language model
_FACTORS = (".lora_A.weight", ".lora_B.weight")
PARAMETERS = ("lora_A", "lora_B")  # of an adapted layer of the train engine
# Linear layers that PEFT takes for the experts of older transformers' mixtures if they are among
# target_modules (0.21: _MOE_TARGET_MODULE_MAPPING), as those that are beside the experts.
_TAKEN_FOR_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def factor_names(weight: str, experts: Sequence[StackedWeight] = ()) -> tuple[str, str]:
    """PEFT's names of A and B for the weight of that name, such as model.…q_proj.weight.

    experts: the adapted weights of experts. PEFT wraps their module once for each, in the order of
    the model, so that the last one's factors have the module's name.
    """
    names = [expert.name for expert in experts]
    module = _PREFIX + weight.removesuffix(".weight")
    if weight in names:
        within = weight.rpartition(".")[0]
        outer = sum(name.rpartition(".")[0] == within for name in names[names.index(weight) + 1 :])
        module = _PREFIX + within + ".base_layer" * outer
    return module + _FACTORS[0], module + _FACTORS[1]


def is_factor(name: str) -> bool:
    """Whether a name in a train engine's model is that of an adapter's factor."""
    return name.rpartition(".")[2] in PARAMETERS


def adapted_weights(manifest: Manifest) -> list[str]:
    """Names of the base's weights for which a version has factors, in its order."""
    experts = () if manifest.adapter is None else manifest.adapter.experts
    stacked = {
        name: expert.name for expert in experts for name in factor_names(expert.name, experts)
    }
    names: dict[str, None] = {}
    for name in manifest.tensors:
        if name in stacked:
            names[stacked[name]] = None
            continue
        for factor in _FACTORS:
            if name.startswith(_PREFIX) and name.endswith(factor):
                names[name.removeprefix(_PREFIX).removesuffix(factor) + ".weight"] = None
    return list(names)


def factor_shapes(
    weight: Sequence[int], rank: int, stacked: StackedWeight | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B for a weight of that shape; of none that a factor has, if it has not two
    dimensions, or three of experts."""
    if len(weight) != (2 if stacked is None else 3):
        return (0,), (0,)
    *experts, rows, columns = weight
    if stacked is not None and stacked.transposed:
        rows, columns = columns, rows
    rank *= math.prod(experts)
    return (rank, columns), (rows, rank)


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale x B A, computed in float32 and rounded once to the number format of W.

    Args:
        weight: W [out, in]. a: A [rank, in]. b: B [out, rank].
    """
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def merge(
    name: str, tensor: torch.Tensor, factors: Mapping[str, torch.Tensor], adapter: Adapter
) -> torch.Tensor:
    """The base's tensor of that name as an adapter makes it, by its factors by PEFT's names."""
    a, b = (factors.get(factor) for factor in factor_names(name, adapter.experts))
    if a is None or b is None:
        return tensor
    stacked = next((expert for expert in adapter.experts if expert.name == name), None)
    # Else the product may be of any size.
    if (tuple(a.shape), tuple(b.shape)) != factor_shapes(tensor.shape, adapter.rank, stacked):
        raise WeightMismatch(
            f"The adapter's factors of {name} have shapes {tuple(b.shape)} and {tuple(a.shape)}, "
            f"which do not multiply to its {tuple(tensor.shape)}."
        )
    if stacked is None:
        return merged(tensor, a, b, adapter.scale)
    whole, experts = tensor.clone(), len(tensor)
    every_a = a.view(experts, -1, a.shape[1])
    every_b = b.view(len(b), -1, experts).permute(2, 0, 1)
    for weight, own_a, own_b in zip(whole, every_a, every_b, strict=True):
        each = weight.T if stacked.transposed else weight
        each.copy_(merged(each, own_a, own_b, adapter.scale))
    return whole


def whole_entries(
    store: Store | NodeCache, weights: WeightsRef | BaseVersion
) -> Mapping[str, TensorEntry]:
    """What is known of each whole tensor that a version means, in order; an adapter's are its base's.

    Raises WeightMismatch where an adapter does not fit its base.
    """
    manifest = open_manifest(store, weights)
    if manifest.adapter is None:
        return manifest.tensors
    assert manifest.base is not None  # as every manifest of an adapter has
    entries, rank = whole_entries(store, manifest.base), manifest.adapter.rank
    shapes = {name: entry.shape for name, entry in manifest.tensors.items()}
    stacked = {expert.name: expert for expert in manifest.adapter.experts}
    expected: dict[str, tuple[int, ...]] = {}
    for name in adapted_weights(manifest):
        shape = entries[name].shape if name in entries else ()
        names = factor_names(name, manifest.adapter.experts)
        expected |= zip(names, factor_shapes(shape, rank, stacked.get(name)), strict=True)
    for name in [*shapes, *expected]:
        if shapes.get(name) != expected.get(name):
            raise WeightMismatch(
                f"Tensor {name} of {weights.key} has shape {shapes.get(name)}, and on the base "
                f"{manifest.base.key} an adapter of rank {rank} has {expected.get(name)} there."
            )
    return entries


def stream_whole(
    store: Store, weights: WeightsRef, names: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `storage.runs.weights.stream`; of an adapter its base's tensors, merged.

    Every tensor read, of the base and of the adapter, is checked before it is used.
    """
    manifest = open_manifest(store, weights)
    if manifest.adapter is None or manifest.base is None:
        yield from stream(store, weights, names)
        return
    factors = dict(stream(store, weights))
    for name, tensor in stream(store, manifest.base, names):
        yield name, merge(name, tensor, factors, manifest.adapter)


def export_adapter(store: Store, weights: WeightsRef, target: Path) -> None:
    """Write a version's adapter into a new folder as PEFT stores it, each tensor checked.

    Raises ValueError for a version that is none.
    """
    from safetensors.torch import save_file

    manifest = open_manifest(store, weights)
    if manifest.adapter is None:
        raise ValueError(
            f"Version {weights.version} ({weights.key}) has whole weights and no adapter. Leave "
            "--adapter out."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        save_file(dict(stream(store, weights)), folder / WEIGHTS_FILE, {"format": "pt"})
        (folder / WEIGHTS_FILE).chmod(0o644)
        (folder / CONFIG_FILE).write_bytes(store.read(f"{weights.key}/{CONFIG_FILE}"))
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def peft_config(
    lora: LoraConfig,
    modules: Iterable[str],
    experts: Sequence[StackedWeight],
    mixture: bool,
    base: PretrainedModel | None,
) -> bytes:
    """adapter_config.json, by which PEFT and vLLM load an adapter.

    Args:
        lora: Rank and scale.
        modules: Names of the adapted layers, without the weight's; PEFT looks at their last parts.
        experts: The adapted weights of experts.
        mixture: Whether the model has any experts.
        base: What transformers loads the base by; None where that is no name or directory.
    """
    layers = {module.rpartition(".")[2] for module in modules}
    # The weight of a linear layer is a parameter too, and its factors then have the same names.
    as_parameters = layers & _TAKEN_FOR_EXPERTS if mixture else set()
    parameters = {f"{layer}.weight" for layer in as_parameters}
    if lora.target_parameters == "all-experts":
        parameters |= {re.sub(r"^.*\.\d+\.", "", expert.name) for expert in experts}
    else:
        parameters |= set(lora.target_parameters)
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else base.path,
        "revision": None if base is None else base.revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(layers - as_parameters),
        "inference_mode": True,
    }
    if parameters:
        facts["target_parameters"] = sorted(parameters)
    return json.dumps(facts, indent=1).encode()
