"""What the specs of several roles have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.grpo import GRPOConfig
from engines.workers.engine import StoreSpec
from storage.objects.store import Store

MODELS = Path(".refrain/models")


def store_spec(config: GRPOConfig, store: Store) -> StoreSpec:
    """From what an engine is built that reads and writes batches alone."""
    return StoreSpec(
        store_uri=store.uri, store_options=config.store.options, cache_bytes=store.cache_bytes
    )


def common(config: GRPOConfig, store: Store) -> dict[str, Any]:
    """Fields of every engine that has the model's tokens, and reads and writes batches."""
    return {
        "model": config.model,
        "model_cache": str(MODELS.absolute()),
        **store_spec(config, store).model_dump(),
    }
