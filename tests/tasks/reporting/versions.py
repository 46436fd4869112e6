"""Small policy versions in a store, whole and as an adapter."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from configs.model import RandomModel
from engines.models.checkpoints import companion_files, materialize
from storage.objects.store import Store
from storage.runs.weights import Adapter, BaseVersion, WeightsRef
from storage.runs.weights_writing import publish

RUN = "tiny-1"


def published(folder: Path) -> tuple[Store, WeightsRef]:
    """Version 0 of a run in a store in that folder: a random Llama of one layer."""
    model = materialize(RandomModel(layers=1, hidden_size=32, heads=1), folder / "models")
    tensors = load_file(model / "model.safetensors")
    store = Store(f"file://{folder}/store")
    return store, publish(store, RUN, 0, tensors.items(), companion_files(model))


def adapted(store: Store, base: WeightsRef) -> WeightsRef:
    """Version 1: an adapter of rank 2 on version 0."""
    name, generator = "model.layers.0.self_attn.q_proj", torch.Generator().manual_seed(0)
    factors = {
        f"base_model.model.{name}.lora_{letter}.weight": torch.randn(shape, generator=generator)
        for letter, shape in (("A", (2, 32)), ("B", (32, 2)))
    }
    below = BaseVersion(key=base.key, digest=base.digest)
    adapter = Adapter(rank=2, alpha=4.0)
    return publish(store, RUN, 1, factors.items(), {}, base=below, adapter=adapter)
