"""A store that is read as it is and in which nothing changes: what would be removed is noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from storage.objects.store import Store

if TYPE_CHECKING:
    from typing_extensions import Buffer


class DryRunStore(Store):
    """See the module's docstring. What is removed is listed on."""

    __slots__ = ("removed",)

    def __init__(self, store: Store) -> None:
        super().__init__(store.uri, store.options, store.cache_bytes)
        self.removed: list[str] = []  # keys, in order

    def delete(self, keys: Sequence[str]) -> None:
        self.removed += keys

    def delete_unfinished(self, prefix: str) -> None:
        pass

    def write(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        pass

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> bool:
        raise AssertionError(f"{key}: a dry run creates nothing")

    def replace(self, key: str, data: bytes, expected: bytes | None) -> None:
        raise AssertionError(f"{key}: a dry run replaces nothing")
