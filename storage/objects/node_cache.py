"""What a machine has of a remote store's objects: read once and shared, or written before the store.

Only objects that never change under their key are kept, such as a policy version's files. An object
is a sparse file in a folder of the machine, with a byte at its end for each chunk that has arrived.
Who needs a chunk takes the file's lock and fetches it; others wait and find it. All readers map the
same pages, and keep them where the file is removed. What is longest unused goes first.

Who writes an object can put it here first, where its readers find it, and it goes to the store a
little later, one object after the other. A local store's files are in their place at once, and on its
disk a little later. Nothing may count on the store before `settle` has returned.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from configs.process import machine_folder, private_folder
from storage.objects.backends import Range
from storage.objects.errors import ObjectDamaged, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from storage.objects.store import Store

logger = logging.getLogger(__name__)

FOLDER = "weights"
CHUNK = 16 * 2**20  # bytes fetched at a time; no more of an object is there than was asked for
SIZE = struct.Struct("<Q")  # of the object; the last bytes of its file

PIECE = 16 * 2**20  # bytes handed to the store at a time


def is_kept(store: Store, limit: int) -> bool:
    """Whether machines keep what they read of a store, at most `limit` bytes.

    Of local files they need not: the system keeps their pages for all.
    """
    return limit > 0 and store.backend.remote


def open_node_cache(store: Store, limit: int) -> NodeCache | None:
    """This machine's cache of a store, among its temporary files; None where none `is_kept`."""
    if not is_kept(store, limit):
        return None
    return NodeCache(store, machine_folder(FOLDER), limit)


class NodeCache:
    """A folder with at most `limit` bytes of a store's objects. Several processes may use one."""

    def __init__(self, store: Store, folder: Path, limit: int) -> None:
        self._store, self._folder, self._limit = store, folder, limit
        private_folder(folder)

    def read_ranges(self, ranges: Sequence[Range]) -> list[memoryview]:
        """As the store's; the bytes map the folder's files privately. Raises ObjectMissing."""
        places: dict[str, list[tuple[int, int]]] = {}
        for key, start, stop in ranges:
            if start < stop:
                places.setdefault(key, []).append((start, stop))
        maps = {key: self._map(key, parts) for key, parts in places.items()}
        views: list[memoryview] = []
        for key, start, stop in ranges:
            mapped = maps.get(key)
            if start >= stop:
                views.append(memoryview(b""))
            elif mapped is None:
                views += self._store.read_ranges([(key, start, stop)])
            else:
                views.append(memoryview(mapped)[start:stop])
        return views

    def read(self, key: str) -> bytes:
        """A small object: what was `put` here, or else the store's. Raises ObjectMissing."""
        return self._store.read(key) if (data := self._whole(key)) is None else data[:]

    def has(self, key: str) -> bool:
        """Whether all of an object is here."""
        return self._whole(key) is not None

    def put(self, key: str, data: bytes) -> None:
        """Keep a small object that the store does not have yet."""
        self.forget(key)
        with self.kept(key, len(data)) as keep:
            keep.put(data)

    @contextlib.contextmanager
    def kept(self, key: str, size: int) -> Iterator[Keeping]:
        """Keeps an object of so many bytes, which the store is to get.

        In the body it takes the object's pieces, in order. Where the body fails, the object is too
        large or the disk is full, nothing is kept.
        """
        if not 0 < size <= self._limit:
            yield Keeping(None)
            return
        path = self._path(key)
        with _locked(path) as file:
            keeping = Keeping(file)
            with keeping.unless_full():
                self._make_room(size)
                _lay_out(file, size)
                os.posix_fallocate(
                    file, 0, size
                )  # so that a full disk is met before the first byte
            try:
                yield keeping
                if keeping.there and keeping.at == size:
                    os.pwrite(file, b"\1" * _chunks(size), size)
                    keeping.pages = mmap.mmap(file, size, access=mmap.ACCESS_READ)
            finally:
                if keeping.pages is None:
                    path.unlink(missing_ok=True)

    def forget(self, key: str) -> None:
        """Drop an object whose bytes turned out to be wrong."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / hashlib.sha256(f"{self._store.uri}/{key}".encode()).hexdigest()[:32]

    def _whole(self, key: str) -> mmap.mmap | None:
        """All bytes of an object, if they are all here."""
        try:
            file = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            length = os.fstat(file).st_size
            if length < SIZE.size:
                return None
            (size,) = SIZE.unpack(os.pread(file, SIZE.size, length - SIZE.size))
            if not size or 0 in os.pread(file, _chunks(size), size):
                return None
            return mmap.mmap(file, size, access=mmap.ACCESS_READ)
        finally:
            os.close(file)

    def _map(self, key: str, parts: Sequence[tuple[int, int]]) -> mmap.mmap | None:
        """The object's file with these parts of it; None for an object that is not kept."""
        path = self._path(key)
        with _locked(path) as file:
            length = os.fstat(file).st_size
            if length == 0:
                size = self._store.size(key)
                if not 0 < size <= self._limit:
                    path.unlink(missing_ok=True)
                    return None
                self._make_room(size)
                length = _lay_out(file, size)
            (size,) = SIZE.unpack(os.pread(file, SIZE.size, length - SIZE.size))
            self._fetch(key, file, size, parts)
            os.utime(file)
            return mmap.mmap(file, size, access=mmap.ACCESS_COPY)

    def _fetch(self, key: str, file: int, size: int, parts: Sequence[tuple[int, int]]) -> None:
        """Bring those chunks of the parts that are not there yet."""
        there = os.pread(file, _chunks(size), size)
        missing = sorted(
            {
                chunk
                for start, stop in parts
                for chunk in range(start // CHUNK, _chunks(min(stop, size)))
                if not there[chunk]
            }
        )
        ranges = [(key, chunk * CHUNK, min((chunk + 1) * CHUNK, size)) for chunk in missing]
        for (_, start, stop), view in zip(ranges, self._store.read_ranges(ranges), strict=True):
            if view.nbytes < stop - start:
                raise ObjectDamaged(f"Object {key} is damaged: it ends within its {size} bytes.")
            _write(file, view, start)
        for chunk in missing:
            os.pwrite(file, b"\1", size + chunk)

    def _make_room(self, size: int) -> None:
        """Remove what is longest unused until so many bytes fit."""
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(nbytes for _, nbytes, _ in files)
        for _, nbytes, path in sorted(files):
            if total + size <= self._limit:
                return
            if nbytes:  # else it is the one for which room is made
                path.unlink(missing_ok=True)
                total -= nbytes


class Keeping:
    """An object on its way into a machine's cache."""

    def __init__(self, file: int | None) -> None:
        """`file`: open, of the cache; None: it is not kept."""
        self._file = file
        self.at = 0  # bytes that were put
        self.pages: mmap.mmap | None = None  # the object, once it is all there

    @property
    def there(self) -> bool:
        """Whether what was put is there."""
        return self._file is not None

    def put(self, data: Buffer) -> None:
        """The object's next bytes."""
        if self._file is not None:
            with self.unless_full():
                self.at += _write(self._file, memoryview(data).cast("B"), self.at)

    @contextlib.contextmanager
    def unless_full(self) -> Iterator[None]:
        """Give up keeping it, with a line in the log, where the body meets a full disk."""
        try:
            yield
        except OSError as error:
            logger.warning("This machine does not keep what it writes to the store: %s", error)
            self._file = None


def _chunks(size: int) -> int:
    return -(-size // CHUNK)


def _lay_out(file: int, size: int) -> int:
    """Make it the file of an object of which nothing is there; returns its length."""
    length = size + _chunks(size) + SIZE.size
    os.ftruncate(file, length)
    os.pwrite(file, SIZE.pack(size), length - SIZE.size)
    return length


def _write(file: int, view: memoryview, start: int) -> int:
    """Write all of it, and return how much that is."""
    written = 0
    while written < view.nbytes:
        written += os.pwrite(file, view[written:], start + written)
    return written


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, which nobody else fills meanwhile."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(path, file):  # it was removed before it could be locked
                continue
            yield file
            return
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a map of it has the lock too, and outlives this
            os.close(file)


def _is_at(path: Path, file: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_ino == os.fstat(file).st_ino
    return False


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
        with self._store.write_stream(key, synced=False) as out:
            yield out.write
        self._coming.append(self._pool.submit(self._store.sync, key))

    def announce(self, key: str, data: bytes) -> None:
        with self._store.write_stream(announced(key), synced=False) as out:
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
