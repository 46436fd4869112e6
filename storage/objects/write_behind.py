"""Objects that a machine has at once, and the store a little later.

What is written goes into the machine's cache, where its readers find it, and from there to the store,
one object after the other. Nothing may count on the store before `settle` has returned.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from storage.objects.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from storage.objects.node_cache import NodeCache
    from storage.objects.store import Store

logger = logging.getLogger(__name__)

PIECE = 16 * 2**20  # bytes handed to the store at a time


class WriteBehind:
    """A store, behind what one process keeps of it on its machine."""

    def __init__(self, store: Store, cache: NodeCache) -> None:
        self.cache = cache
        self._store = store
        self._coming: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write-behind")

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

    def settle(self) -> None:
        """Return when the store has all that was written; raise the first error that it met."""
        coming, self._coming = self._coming, []
        for copied in coming:
            copied.result()

    def abandon(self) -> None:
        """Give up what the store has not got yet; returns once nothing is under way."""
        coming, self._coming = self._coming, []
        for copied in coming:
            copied.cancel()
        for copied in coming:
            if not copied.cancelled():
                copied.exception()

    def _copy(self, key: str, pages: mmap.mmap) -> None:
        with self._store.write_stream(key) as out, memoryview(pages) as view:
            for start in range(0, len(view), PIECE):
                out.write(view[start : start + PIECE])
