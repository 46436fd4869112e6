"""The object store: bytes under keys, written atomically, on any fsspec file system.

Keys are POSIX paths relative to the store's address; refs hold keys, so a store can be moved.
What the bytes mean is said elsewhere: in storage/batches/ and storage/runs/.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar, cast

from configs.environment import pip_install
from storage.objects.backends import Backend, FsspecBackend, Keys, LocalBackend, Range, clean_key
from storage.objects.errors import (
    Conflict,
    ObjectMissing,
    OutOfAttempts,
    StoreError,
    StoreUnavailable,
    retry,
)
from storage.objects.usage import COUNTER, LATENCIES

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Ranges of one remote object that lie closer than this are read as one: a round trip costs more.
GAP_BYTES = 16 * 2**10

T = TypeVar("T")

_BACKENDS: dict[tuple[int, str, str], Backend] = {}
_CACHES: dict[tuple[int, str, str], ByteCache] = {}
_LOCK = threading.Lock()


class ByteCache:
    """The most recently used ranges, at most `limit` bytes of them. Safe to use from threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._lock = threading.Lock()
        self._ranges: OrderedDict[Range, memoryview] = OrderedDict()

    def get(self, where: Range) -> memoryview | None:
        with self._lock:
            data = self._ranges.get(where)
            if data is not None:
                self._ranges.move_to_end(where)
            return data

    def put(self, where: Range, data: memoryview) -> None:
        """Keep `data`, and forget the least recently used ranges that no longer fit."""
        with self._lock:
            old = self._ranges.pop(where, None)
            if old is not None:
                self.nbytes -= old.nbytes
            if data.nbytes > self.limit:
                return
            self._ranges[where] = data
            self.nbytes += data.nbytes
            while self.nbytes > self.limit:
                _, dropped = self._ranges.popitem(last=False)
                self.nbytes -= dropped.nbytes

    def forget(self, key: str) -> None:
        """Drop what is kept of an object that was written or deleted."""
        with self._lock:
            for where in [where for where in self._ranges if where[0] == key]:
                self.nbytes -= self._ranges.pop(where).nbytes


def merge_ranges(ranges: Sequence[Range], gap: int) -> tuple[list[Range], list[tuple[int, int]]]:
    """Join ranges of one object that lie at most `gap` bytes apart.

    Returns the joined ranges and, for each given one, its (number among them, offset within).
    """
    merged: list[Range] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(ranges)
    for number in sorted(range(len(ranges)), key=lambda number: ranges[number]):
        key, start, stop = ranges[number]
        if merged and merged[-1][0] == key and start <= merged[-1][2] + gap:
            first = merged[-1][1]
            merged[-1] = (key, first, max(stop, merged[-1][2]))
        else:
            first = start
            merged.append((key, start, stop))
        places[number] = (len(merged) - 1, start - first)
    return merged, places


class Store:
    """A folder, bucket or prefix that holds runs. Small, picklable, safe to use from threads.

    `uri` is an fsspec address (`file://`, `s3://`, `memory://`, …; a path without a protocol is
    a local folder), `options` the arguments of its file system. `cache_bytes` bounds the bytes
    of remote ranges that this process keeps; local files need no cache.
    """

    __slots__ = ("_options", "cache_bytes", "uri")

    def __init__(
        self, uri: str, options: Mapping[str, object] | None = None, cache_bytes: int = 0
    ) -> None:
        protocol, separator, path = uri.partition("://")
        if not separator or protocol in ("file", "local"):
            # Absolute, so that workers in other folders mean the same place.
            uri = "file://" + os.path.abspath(os.path.expanduser(path if separator else uri))
        self.uri = uri.rstrip("/")
        self._options = json.dumps(dict(options or {}), sort_keys=True)
        self.cache_bytes = cache_bytes

    @property
    def options(self) -> dict[str, object]:
        return dict(json.loads(self._options))

    def with_cache(self, cache_bytes: int) -> Store:
        """This store, with a cache of so many bytes in each process that uses it."""
        return Store(self.uri, self.options, cache_bytes)

    def __getstate__(self) -> tuple[str, str, int]:
        return self.uri, self._options, self.cache_bytes

    def __setstate__(self, state: tuple[str, str, int]) -> None:
        self.uri, self._options, self.cache_bytes = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.__getstate__() == other.__getstate__()

    def __hash__(self) -> int:
        return hash(self.__getstate__())

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"  # options may hold what should not be printed

    @property
    def backend(self) -> Backend:
        name = (os.getpid(), self.uri, self._options)
        backend = _BACKENDS.get(name)
        if backend is None:
            with _LOCK:
                backend = _BACKENDS.get(name)
                if backend is None:
                    backend = _BACKENDS[name] = _open_backend(self.uri, self.options)
        return backend

    @property
    def cache(self) -> ByteCache | None:
        """This process's cache of the store; None where reads are local or no cache is wanted."""
        if not self.cache_bytes or not self.backend.remote:
            return None
        name = (os.getpid(), self.uri, self._options)
        with _LOCK:
            cache = _CACHES.setdefault(name, ByteCache(self.cache_bytes))
            cache.limit = self.cache_bytes
        return cache

    def url(self, key: str) -> str:
        """The full address of an object, for people."""
        return self.backend.url(clean_key(key))

    def read(self, key: str) -> bytes:
        """The whole object. Raises ObjectMissing."""
        data = self._try("read", key, lambda _: self.backend.read(clean_key(key)))
        COUNTER.add(bytes_read=len(data))
        return data

    def read_ranges(self, ranges: Sequence[Range]) -> list[memoryview]:
        """The bytes of each (key, start, stop), in parallel; of local files without a copy.

        A range that reaches past the object's end comes back short. Raises ObjectMissing, and
        ValueError for a key that is no clean path: keys often come from what a store says.
        """
        for key in {key for key, _, _ in ranges}:
            clean_key(key)
        views: list[memoryview | None] = [None] * len(ranges)
        misses: list[int] = []
        cache = self.cache
        for number, where in enumerate(ranges):
            if where[2] <= where[1]:
                views[number] = memoryview(b"")
                continue
            views[number] = cache.get(where) if cache else None
            if views[number] is None:
                misses.append(number)
        for number, data in zip(misses, self._fetch([ranges[n] for n in misses]), strict=True):
            views[number] = data
            if cache:
                cache.put(ranges[number], data)
        return [data for data in views if data is not None]

    def _fetch(self, ranges: list[Range]) -> list[memoryview]:
        """Read ranges that are not cached; those that fail transiently are tried again alone."""
        if not ranges:
            return []
        done: dict[int, memoryview] = {}
        if self.backend.remote:
            merged, places = merge_ranges(ranges, GAP_BYTES)
        else:
            merged, places = ranges, [(number, 0) for number in range(len(ranges))]

        def attempt(_: int) -> None:
            pending = [number for number in range(len(merged)) if number not in done]
            failed: BaseException | None = None
            answers = self.backend.read_ranges([merged[number] for number in pending])
            for number, part in zip(pending, answers, strict=True):
                if isinstance(part, memoryview):
                    done[number] = part
                elif isinstance(part, FileNotFoundError):
                    raise ObjectMissing(f"{self.url(merged[number][0])} does not exist") from part
                else:
                    failed = failed or part
            if failed is not None:
                raise failed

        self._try("read", ranges[0][0], attempt)
        COUNTER.add(bytes_read=sum(part.nbytes for part in done.values()))
        return [
            done[number][at : at + stop - start]
            for (number, at), (_, start, stop) in zip(places, ranges, strict=True)
        ]

    def write(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        """Store the bytes (or the pieces, joined) under the key; they appear at once or never."""
        chunks = _chunks(data)
        self._try("write", key, lambda _: self.backend.write(clean_key(key), chunks))
        COUNTER.add(bytes_written=_size(chunks))
        self._forget(key)

    @contextlib.contextmanager
    def write_stream(self, key: str, synced: bool = True) -> Iterator[IO[bytes]]:
        """A binary file to write to; the object appears when the block ends without an error.

        For what is too large to hold twice. Parts in flight on S3 take 64 MiB. synced: false only of
        a local store, whose file can be read at once and stays after `sync`; until then it outlives
        its writer, and not the machine.
        """
        write = self.backend.write_stream if synced else self._local().write_unsynced
        with contextlib.ExitStack() as stack:
            file = self._try(
                "write", key, lambda _: stack.enter_context(write(clean_key(key))), "open"
            )
            yield file
            nbytes = file.tell()
            with LATENCIES.timed("close"):
                self._try_once("write", key, stack.close)
        COUNTER.add(bytes_written=nbytes)
        self._forget(key)

    def sync(self, key: str) -> None:
        """Return once the disk of a local store has an object. Raises ObjectMissing."""
        self._try("sync", key, lambda _: self._local().sync(clean_key(key)))

    def _local(self) -> LocalBackend:
        backend = self.backend
        assert isinstance(backend, LocalBackend), f"{self.uri} is not local"
        return backend

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> bool:
        """Store the bytes only if nothing is there. False when something is.

        Of several writers at once exactly one gets True (see FsspecBackend for its limits).
        """
        chunks = _chunks(data)

        def attempt(number: int) -> bool:
            try:
                self.backend.create(clean_key(key), chunks)
            except FileExistsError:
                # After a lost answer the object that is in the way may be our own.
                return number > 0 and self.backend.read(key) == b"".join(chunks)
            return True

        created = self._try("create", key, attempt)
        COUNTER.add(bytes_written=_size(chunks))
        self._forget(key)
        return created

    def replace(self, key: str, data: bytes, expected: bytes | None) -> None:
        """Compare and swap: store `data` only if the object is `expected` (None: absent).

        Raises Conflict if it is something else. Atomic on local files (a lock file beside the
        object) and S3 (If-Match); elsewhere among the threads of one process.
        """
        if expected is None:
            if not self.create(key, data):
                raise Conflict(f"{self.url(key)} exists already; it was expected to be absent")
            return

        def attempt(number: int) -> bool:
            if self.backend.replace(clean_key(key), data, expected):
                return True
            return number > 0 and self.backend.read(key) == data

        if not self._try("replace", key, attempt):
            raise Conflict(f"{self.url(key)} was changed by another writer")
        COUNTER.add(bytes_written=len(data))
        self._forget(key)

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except ObjectMissing:
            return False
        return True

    def size(self, key: str) -> int:
        """Bytes of the object. Raises ObjectMissing."""
        return self._try("look up", key, lambda _: self.backend.size(clean_key(key)))

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """Bytes of each object; of several in a folder by listing it. Raises ObjectMissing."""
        folders: dict[str, Keys] = {}
        for key in keys:
            folders.setdefault(clean_key(key).rpartition("/")[0], []).append(key)
        sizes: dict[str, int] = {}
        for folder, members in folders.items():
            sizes |= self._sizes_in(folder, members)
        return sizes

    def _sizes_in(self, folder: str, keys: Keys) -> dict[str, int]:
        sizes = self._try("look up", keys[0], lambda _: self.backend.sizes(folder, keys))
        for key in keys:
            if key not in sizes:
                raise ObjectMissing(f"{self.uri}/{key} does not exist")
        return {key: sizes[key] for key in keys}

    def list(self, prefix: str = "") -> Keys:
        """Every key below the folder `prefix`, sorted; objects being written are not listed."""
        keys = self._try("list", prefix, lambda _: self.backend.list(clean_key(prefix, True)))
        return sorted(keys)

    def sizes_below(self, prefix: str = "") -> dict[str, int]:
        """Bytes of every object below the folder `prefix`, by key, as one listing has them."""
        sizes = self._try(
            "list", prefix, lambda _: self.backend.sizes_below(clean_key(prefix, True))
        )
        return dict(sorted(sizes.items()))

    @property
    def local_folder(self) -> Path | None:
        """The folder of a local store; None of any other."""
        return self.backend.root if isinstance(self.backend, LocalBackend) else None

    def children(self, prefix: str = "") -> Keys:
        """Names right below the folder `prefix`, objects and folders, sorted."""
        names = self._try("list", prefix, lambda _: self.backend.children(clean_key(prefix, True)))
        return sorted(names)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        for key in keys:
            clean_key(key)
        if keys:
            self._try("delete", keys[0], lambda _: self.backend.delete(keys))
        for key in keys:
            self._forget(key)

    def delete_unfinished(self, prefix: str) -> None:
        """Remove what writers that died began to write below the folder `prefix`.

        Such beginnings are invisible to readers. Nobody may be writing there.
        """
        self._try("clean", prefix, lambda _: self.backend.delete_unfinished(clean_key(prefix)))

    def check_writable(self) -> None:
        """Write, read and remove a small object. Raises StoreError with what to change."""
        key = f".check-{uuid.uuid4().hex[:12]}"
        try:
            self.write(key, b"refrain")
            if self.read(key) != b"refrain":
                raise StoreError(f"{self.url(key)} reads back differently")
            guarded = self._try("check", key, lambda _: self.backend.conditions_hold(key))
            self.delete([key])
        except (StoreError, ValueError, ImportError, OSError) as error:
            raise StoreError(
                f"The store {self.uri} cannot be written: {error}. "
                "Set store.uri to a folder or bucket that this user may write."
            ) from error
        if not guarded:
            raise StoreError(
                f"The store {self.uri} ignores conditional writes (If-None-Match, If-Match), which "
                "keep two flows from committing the same step. Use a store that has them, or set "
                "store.options.conditional_writes=false and never run two flows on one run."
            )

    def _forget(self, key: str) -> None:
        if cache := self.cache:
            cache.forget(key)

    def _try(self, what: str, key: str, attempt: Callable[[int], T], timed_as: str = "") -> T:
        """Retry what may pass, and turn the rest into this module's errors.

        timed_as: name in LATENCIES, if it is not `what`.
        """
        operation = timed_as or what.replace(" ", "_")

        def counted(number: int) -> T:
            if not self.backend.counts_requests:
                COUNTER.add(requests=1)
            with LATENCIES.timed(operation):
                return attempt(number)

        return self._try_once(
            what, key, lambda: retry(f"{what} {self.uri}/{key}", counted, self.backend.transient)
        )

    def _try_once(self, what: str, key: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise ObjectMissing(f"{self.uri}/{key} does not exist") from error
        except OutOfAttempts as error:
            raise StoreUnavailable(
                f"{self.uri} does not answer: {error} ({_reason(error.__cause__)})"
            ) from error.__cause__
        except OSError as error:
            raise StoreError(f"Could not {what} {self.uri}/{key}: {_reason(error)}") from error


def _open_backend(uri: str, options: Mapping[str, object]) -> Backend:
    """What keeps the bytes of a store, by the scheme of its address."""
    protocol, _, path = uri.partition("://")
    if protocol == "file":
        return LocalBackend(path, shared_by_group=options.get("shared_by_group") is True)
    if protocol in ("s3", "s3a"):
        try:
            from storage.objects.s3 import S3Backend

            return S3Backend(path, options)
        except ImportError as error:
            raise StoreError(
                f"{uri} needs the package s3fs. Install it: {pip_install('s3fs')}."
            ) from error
    import fsspec

    # fsspec keeps one instance per thread; a store is used from many threads and wants one.
    fs = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    return FsspecBackend(fs, fs._strip_protocol(uri))


def _chunks(data: Buffer | Sequence[Buffer]) -> list[memoryview]:
    pieces = data if isinstance(data, (list, tuple)) else [data]
    return [memoryview(cast("Buffer", piece)).cast("B") for piece in pieces]


def _size(chunks: Sequence[memoryview]) -> int:
    return sum(chunk.nbytes for chunk in chunks)


def _reason(error: BaseException | None) -> str:
    """The cause in a few words: an error without a text is named by its class."""
    return str(error) or type(error).__name__
