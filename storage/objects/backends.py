"""How bytes are kept: local files, S3, and any other fsspec file system.

Each backend does one attempt and raises what the operating system or the client library raises;
`storage.objects.store` translates, retries and names. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Protocol, cast

from pydantic import AfterValidator

if TYPE_CHECKING:
    from typing_extensions import Buffer

Range = tuple[str, int, int]  # key, first byte, byte after the last
Keys = list[str]
Views = list[memoryview | BaseException]
LISTED = 3  # objects of one folder whose sizes cost less in a listing than one by one
ABANDONED = 3600.0  # seconds without a write after which a half-written file is nobody's
SHARED_FILE, SHARED_FOLDER = 0o660, 0o2770  # of a store that a group shares
AT_ONCE = 2**30  # bytes that a file is given in one call
LOCAL_TRANSIENT = {errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EREMOTEIO}


def clean_key(key: str, folder: bool = False) -> str:
    """`key` if it is a clean relative path; an empty one only where a folder is meant.

    Raises ValueError.
    """
    if folder and not key:
        return key
    parts = key.split("/")
    if not all(parts) or ".." in parts or "." in parts or "\\" in key or "\0" in key:
        raise ValueError(
            f"Key {key!r:.200} is no relative POSIX path; use names joined by single slashes."
        )
    return key


def _stored(key: str) -> str:
    try:
        return clean_key(key)
    except ValueError:
        raise ValueError(f"{key!r:.200} leads out of the store, or is no clean path") from None


StoredKey = Annotated[str, AfterValidator(_stored)]  # a field of a record that is read from a store


class Backend(Protocol):
    """One attempt at each operation; keys are checked POSIX paths relative to the store."""

    remote: bool  # a read costs a round trip, so near ranges are merged and reads are cached
    counts_requests: bool  # it counts its requests itself, each that it really makes

    def url(self, key: str) -> str: ...
    def read(self, key: str) -> bytes: ...
    def read_ranges(self, ranges: Sequence[Range]) -> Views: ...
    def write(self, key: str, chunks: Sequence[memoryview]) -> None: ...
    def write_stream(self, key: str) -> contextlib.AbstractContextManager[IO[bytes]]: ...
    def create(self, key: str, chunks: Sequence[memoryview]) -> None: ...
    def replace(self, key: str, data: bytes, expected: bytes) -> bool: ...
    def size(self, key: str) -> int: ...
    def sizes(self, folder: str, keys: Sequence[str]) -> Mapping[str, int]: ...  # of those there
    def list(self, prefix: str) -> Keys: ...
    def sizes_below(self, prefix: str) -> Mapping[str, int]: ...
    def children(self, prefix: str) -> Keys: ...
    def delete(self, keys: Sequence[str]) -> None: ...
    def delete_unfinished(self, prefix: str) -> None: ...
    def transient(self, error: BaseException) -> bool: ...
    def conditions_hold(self, key: str) -> bool: ...


class LocalBackend:
    """Files under a folder. A file appears by link or rename once its bytes are on disk.

    Reads are private memory maps: nothing is copied, and a reader that writes into its tensors
    changes its own pages only. A name that starts with a dot is being written, and never listed.
    """

    remote = False
    counts_requests = False

    def __init__(self, root: str, shared_by_group: bool = False) -> None:
        """`shared_by_group`: the group of the folder may read and write what is made, whatever the
        process's umask says."""
        self.root = Path(root)
        self._shared = shared_by_group

    def url(self, key: str) -> str:
        return f"file://{self.root / key}"

    def read(self, key: str) -> bytes:
        with self._open(key) as file:
            return file.read()

    def read_ranges(self, ranges: Sequence[Range]) -> Views:
        maps: dict[str, mmap.mmap | bytes | OSError] = {}
        for key in {key for key, _, _ in ranges}:
            try:
                with self._open(key) as file:
                    size = os.fstat(file.fileno()).st_size
                    maps[key] = (
                        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
                    )
            except OSError as error:
                maps[key] = error
        views: Views = []
        for key, start, stop in ranges:
            mapped = maps[key]
            views.append(mapped if isinstance(mapped, OSError) else memoryview(mapped)[start:stop])
        return views

    def _open(self, key: str) -> IO[bytes]:
        """A file to read. OSError for a pipe or a device, which may never end."""
        file = open(self.root / key, "rb", opener=_without_waiting)  # noqa: SIM115
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "it is no regular file")
        return file

    @contextlib.contextmanager
    def _temporary(self, key: str) -> Iterator[tuple[IO[bytes], Path]]:
        """A file beside `key` that is gone at the end unless it was renamed."""
        target = self.root / key
        path = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
        with contextlib.ExitStack() as stack:
            file = self._open_new(path)
            stack.callback(path.unlink, missing_ok=True)
            stack.callback(file.close)
            yield file, path

    def _open_new(self, path: Path) -> IO[bytes]:
        # Who deletes a folder's last object removes it too: between these two calls, and in mkdir
        # between its own, which then says that the folder exists, or that the one above does not.
        for _ in range(100):
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                self._make_folder(path.parent)
                return self._new_file(path)
        return self._new_file(path)

    def _make_folder(self, folder: Path) -> None:
        if not self._shared:
            folder.mkdir(parents=True, exist_ok=True)
            return
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            path.chmod(SHARED_FOLDER)

    def _new_file(self, path: Path) -> IO[bytes]:
        file = cast("IO[bytes]", _WholeWrites(path, "xb"))
        if self._shared:
            os.fchmod(file.fileno(), SHARED_FILE)
        return file

    def write(self, key: str, chunks: Sequence[memoryview]) -> None:
        with self.write_stream(key) as file:
            for chunk in chunks:
                file.write(chunk)

    @contextlib.contextmanager
    def write_stream(self, key: str) -> Iterator[IO[bytes]]:
        with self._temporary(key) as (file, path):
            yield file
            os.fsync(file.fileno())
            os.replace(path, self.root / key)
            _sync_folder(path.parent)

    @contextlib.contextmanager
    def write_unsynced(self, key: str) -> Iterator[IO[bytes]]:
        """As `write_stream`, of a file that this machine's end may still take, until `sync`."""
        with self._temporary(key) as (file, path):
            yield file
            os.replace(path, self.root / key)

    def sync(self, key: str) -> None:
        """Return once a file, and that it is in its folder, are on the disk."""
        path = self.root / key
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        _sync_folder(path.parent)

    def create(self, key: str, chunks: Sequence[memoryview]) -> None:
        if (self.root / key).exists():
            raise FileExistsError(key)
        with self._temporary(key) as (file, path):
            for chunk in chunks:
                file.write(chunk)
            os.fsync(file.fileno())
            os.link(path, self.root / key)
            _sync_folder(path.parent)

    def replace(self, key: str, data: bytes, expected: bytes) -> bool:
        target = self.root / key
        lock = target.with_name(f".{target.name}.lock")
        with open(lock, "ab") as lock_file:
            if self._shared and os.fstat(lock_file.fileno()).st_uid == os.getuid():
                os.fchmod(lock_file.fileno(), SHARED_FILE)
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            if target.read_bytes() != expected:
                return False
            self.write(key, [memoryview(data)])
            return True

    def size(self, key: str) -> int:
        path = self.root / key
        if path.is_dir():
            raise FileNotFoundError(key)
        return path.stat().st_size

    def sizes(self, folder: str, keys: Sequence[str]) -> Mapping[str, int]:
        return _one_by_one(self, keys)

    def sizes_below(self, prefix: str) -> Mapping[str, int]:
        return _one_by_one(self, self.list(prefix))  # one that goes meanwhile is left out

    def list(self, prefix: str) -> Keys:
        keys = []
        for folder, _, names in os.walk(self.root / prefix):
            base = Path(folder).relative_to(self.root)
            keys += [(base / name).as_posix() for name in names if not name.startswith(".")]
        return keys

    def children(self, prefix: str) -> Keys:
        try:
            names = os.listdir(self.root / prefix)
        except FileNotFoundError:
            return []
        return [name for name in names if not name.startswith(".")]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            (self.root / key).unlink(missing_ok=True)
        for folder in {Path(key).parent for key in keys}:
            self._remove_leftovers(self.root / folder)
        for folder in sorted({p for key in keys for p in Path(key).parents}, reverse=True):
            with contextlib.suppress(OSError):
                (self.root / folder).rmdir()

    def delete_unfinished(self, prefix: str) -> None:
        for folder, _, _ in os.walk(self.root / prefix):
            self._remove_leftovers(Path(folder), 0.0)

    @staticmethod
    def _remove_leftovers(folder: Path, age: float = ABANDONED) -> None:
        """Locks of files that are gone, and what killed writers left half written."""
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):  # another has removed it
            return
        for name in names:
            path = folder / name
            if name.startswith(".") and name.endswith(".lock"):
                if not (folder / name[1 : -len(".lock")]).exists():
                    path.unlink(missing_ok=True)
            elif name.startswith(".") and name.endswith(".tmp"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime >= age:
                        path.unlink()

    def transient(self, error: BaseException) -> bool:
        return isinstance(error, OSError) and error.errno in LOCAL_TRANSIENT

    def conditions_hold(self, key: str) -> bool:
        return True


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe too, without waiting for its other end; of a file it changes nothing."""
    return os.open(path, flags | os.O_NONBLOCK)


class _WholeWrites(io.FileIO):
    """An unbuffered file that takes all it is given; one call of the system takes at most 2 GiB."""

    def write(self, data: Buffer) -> int:
        view = memoryview(data)
        size = view.nbytes
        view = view.cast("B") if size else view
        while view.nbytes:
            view = view[super().write(view[:AT_ONCE]) :]
        return size


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _one_by_one(backend: Backend, keys: Sequence[str]) -> dict[str, int]:
    sizes = {}
    for key in keys:
        with contextlib.suppress(FileNotFoundError):
            sizes[key] = backend.size(key)
    return sizes


class FsspecBackend:
    """Any fsspec file system whose writes appear at once, as an object store's do.

    `create` is atomic where the file system's own exclusive mode is. `replace` reads, compares and
    writes under a lock of this process: two processes can race, and only the run's lease keeps
    them apart. S3 and local files have a real compare-and-swap.
    """

    remote = True
    counts_requests = False

    def __init__(self, fs: Any, root: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self._lock = threading.Lock()

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root

    def url(self, key: str) -> str:
        return str(self.fs.unstrip_protocol(self._path(key)))

    def read(self, key: str) -> bytes:
        return bytes(self.fs.cat_file(self._path(key)))

    def read_ranges(self, ranges: Sequence[Range]) -> Views:
        parts = self.fs.cat_ranges(
            [self._path(key) for key, _, _ in ranges],
            [start for _, start, _ in ranges],
            [stop for _, _, stop in ranges],
            on_error="return",
        )
        return [memoryview(part) if isinstance(part, bytes) else part for part in parts]

    def write(self, key: str, chunks: Sequence[memoryview]) -> None:
        self.fs.pipe_file(self._path(key), b"".join(chunks))

    @contextlib.contextmanager
    def write_stream(self, key: str) -> Iterator[IO[bytes]]:
        buffer = io.BytesIO()
        yield buffer
        self.write(key, [buffer.getbuffer()])

    def create(self, key: str, chunks: Sequence[memoryview]) -> None:
        with self._lock:
            self.fs.pipe_file(self._path(key), b"".join(chunks), mode="create")

    def replace(self, key: str, data: bytes, expected: bytes) -> bool:
        with self._lock:
            if self.read(key) != expected:
                return False
            self.write(key, [memoryview(data)])
            return True

    def size(self, key: str) -> int:
        info = self.fs.info(self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(key)
        return int(info["size"])

    def sizes(self, folder: str, keys: Sequence[str]) -> Mapping[str, int]:
        if len(keys) < LISTED:
            return _one_by_one(self, keys)
        try:
            entries = self.fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        cut = len(self.root) + 1
        return {
            entry["name"][cut:]: int(entry["size"]) for entry in entries if entry["type"] == "file"
        }

    def sizes_below(self, prefix: str) -> Mapping[str, int]:
        cut = len(self.root) + 1
        entries = self.fs.find(self._path(prefix), detail=True)
        return {path[cut:]: int(entry["size"]) for path, entry in entries.items()}

    def list(self, prefix: str) -> Keys:
        cut = len(self.root) + 1
        return [path[cut:] for path in self.fs.find(self._path(prefix))]

    def children(self, prefix: str) -> Keys:
        try:
            paths = self.fs.ls(self._path(prefix), detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rsplit("/", 1)[1] for path in paths]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self._path(key))

    def delete_unfinished(self, prefix: str) -> None:
        """Nothing is begun where writes appear at once."""

    def transient(self, error: BaseException) -> bool:
        return isinstance(error, (ConnectionError, TimeoutError))

    def conditions_hold(self, key: str) -> bool:
        """Whether writes that must not overwrite are refused; `key` is an object that exists."""
        return True
