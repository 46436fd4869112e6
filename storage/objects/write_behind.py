"""Objects that a machine has at once, and the store a little later.

What is written goes into the machine's cache, where its readers find it, and from there to the store,
one object after the other. A local store's files are in their place at once, and on its disk a little
later. Nothing may count on the store before `settle` has returned.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from storage.objects.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from storage.objects.node_cache import NodeCache
    from storage.objects.store import Store

logger = logging.getLogger(__name__)

PIECE = 16 * 2**20  # bytes handed to the store at a time


class Behind(Protocol):
    """A store that is behind what one process writes."""

    @property
    def cache(self) -> NodeCache | None:
        """In which this machine's readers find it; None: in the store."""

    def written(
        self, key: str, size: int
    ) -> contextlib.AbstractContextManager[Callable[[Buffer], object]]:
        """Takes an object of so many bytes, in pieces."""

    def announce(self, key: str, data: bytes) -> None:
        """Let readers of this machine have a small object that the store is to have last."""

    def settle(self) -> None:
        """Return when the store has all that was written; raise the first error that it met."""

    def abandon(self) -> None:
        """Give up what the store has not got yet; returns once nothing is under way."""


def open_behind(store: Store, cache: NodeCache | None) -> Behind | None:
    """The way of a policy version to a store; None where its readers wait for the store."""
    if cache is not None:
        return WriteBehind(store, cache)
    return None if store.backend.remote else SyncBehind(store)


def announced(key: str) -> str:
    """Where an object of a local store stands until the store has it; gone a little later."""
    folder, _, name = key.rpartition("/")
    return f"{folder}/announced-{name}"


class _Coming:
    """What goes to the store, one after the other."""

    def __init__(self) -> None:
        self._coming: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write-behind")

    def settle(self) -> None:
        coming, self._coming = self._coming, []
        for copied in coming:
            copied.result()

    def abandon(self) -> None:
        coming, self._coming = self._coming, []
        for copied in coming:
            copied.cancel()
        for copied in coming:
            if not copied.cancelled():
                copied.exception()


class SyncBehind(_Coming):
    """A local store, whose disk is behind its files."""

    cache = None

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    @contextlib.contextmanager
    def written(self, key: str, size: int) -> Iterator[Callable[[Buffer], object]]:
        with self._store.write_unsynced(key) as out:
            yield out.write
        self._coming.append(self._pool.submit(self._store.sync, key))

    def announce(self, key: str, data: bytes) -> None:
        with self._store.write_unsynced(announced(key)) as out:
            out.write(data)


class WriteBehind(_Coming):
    """A remote store, behind what one process keeps of it on its machine."""

    def __init__(self, store: Store, cache: NodeCache) -> None:
        super().__init__()
        self.cache = cache
        self._store = store

    def announce(self, key: str, data: bytes) -> None:
        self.cache.put(key, data)

    @contextlib.contextmanager
    def written(self, key: str, size: int) -> Iterator[Callable[[Buffer], object]]:
        """Takes an object of so many bytes, in pieces; what does not fit here goes to the store."""
        with self.cache.kept(key, size) as keeping:
            if not keeping.there:
                logger.warning(
                    "%s (%d bytes) goes to the store, which its readers wait for: this machine does "
                    "not keep it. Set store.node_cache_gib higher, or make room in its temporary "
                    "folder.",
                    key,
                    size,
                )
                with self._store.write_stream(key) as out:
                    yield out.write
                return
            yield keeping.put
            if not keeping.there:
                raise StoreError(
                    f"{key} could not be kept on this machine while it was written (see the log). "
                    "Make room in its temporary folder, or set store.node_cache_gib = 0."
                )
        assert keeping.pages is not None, "fewer bytes were put than announced"
        self._coming.append(self._pool.submit(self._copy, key, keeping.pages))

    def _copy(self, key: str, pages: mmap.mmap) -> None:
        with self._store.write_stream(key) as out, memoryview(pages) as view:
            for start in range(0, len(view), PIECE):
                out.write(view[start : start + PIECE])
