"""What an engine that reads and writes batches is told of their store."""

from __future__ import annotations

from pydantic import Field

from configs.base import Settings
from storage.objects.store import Store


class StoreSpec(Settings):
    """Where batches are."""

    store_uri: str = Field(description="Store of batches.")
    store_options: dict[str, str | int | float | bool] = Field(description="Its arguments.")
    cache_bytes: int = Field(0, ge=0, description="Batch cache of this process, in bytes.")

    def open_store(self) -> Store:
        """The store, with a cache of this process."""
        return Store(self.store_uri, self.store_options, cache_bytes=self.cache_bytes)
