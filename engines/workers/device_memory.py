"""Tensors between a device's memory and the host's: copied, put away and brought back, pinned."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import mmap
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.workers.engine import Moved
from storage.batches.tensors import bytes_of

LANES = 8  # of a device
PIECE = 16 * 2**20  # bytes that are on their way at a time

T = TypeVar("T")
logger = logging.getLogger(__name__)

BLOCK = 2**30  # bytes registered at once; a larger tensor is a block of its own
ALIGN = 4096  # bytes; a tensor in a block begins at a multiple
THREADS = 8  # that touch a block

Unregister = Callable[[], object]
Register = Callable[[int, int], Unregister]  # of an address and bytes


class Lane:
    """A way to and from one device; used by one thread at a time.

    It has a stream and two pieces of pinned memory of its own: while one is read or filled, the other
    is on the bus. Several lanes hash and write, or read and hash, at several times the speed of one
    thread. They are made once for a device and stay.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        pinned = self._stream is not None
        self._buffers = [torch.zeros(PIECE, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]

    def after(self, ready: torch.cuda.Event | None) -> None:
        """Do what follows once the device has come to `ready`."""
        if self._stream is not None and ready is not None:
            self._stream.wait_event(ready)

    def out(self, tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
        """A tensor's bytes, cast to `dtype`, in pieces; each is good until the next is asked for."""
        with self._queue():
            flat = tensor.reshape(-1)  # a copy where its elements do not lie in order
        count = PIECE // dtype.itemsize
        parts = [flat[start : start + count] for start in range(0, len(flat), count)]
        cast = None
        if parts and flat.dtype != dtype:
            with self._queue():
                cast = torch.empty(len(parts[0]), dtype=dtype, device=flat.device)
        coming = self._fetch(parts[0], 0, cast, dtype) if parts else None
        for number, part in enumerate(parts):
            here, coming = coming, None
            if number + 1 < len(parts):
                coming = self._fetch(parts[number + 1], number + 1, cast, dtype)
            if here is not None:
                here.synchronize()
            yield self._arrays[number % 2].data[: len(part) * dtype.itemsize]

    def into(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor of the host into one of the device; both contiguous, of one format."""
        data, flat = bytes_of(source), target.detach().view(-1).view(torch.uint8)
        busy: list[torch.cuda.Event | None] = [None, None]
        for number, start in enumerate(range(0, len(data), PIECE)):
            part, place = data[start : start + PIECE], number % 2
            if (before := busy[place]) is not None:
                before.synchronize()
            np.copyto(self._arrays[place][: len(part)], part)
            with self._queue():
                buffer = self._buffers[place][: len(part)]
                flat[start : start + len(part)].copy_(buffer, non_blocking=True)
                busy[place] = self._recorded()
        self.wait()

    def wait(self) -> None:
        """Return once nothing is under way here."""
        if self._stream is not None:
            self._stream.synchronize()

    def _fetch(
        self, part: Tensor, number: int, cast: Tensor | None, dtype: torch.dtype
    ) -> torch.cuda.Event | None:
        buffer = self._buffers[number % 2][: len(part) * dtype.itemsize].view(dtype)
        with self._queue():
            if cast is not None:  # by the device
                part = cast[: len(part)].copy_(part)
            buffer.copy_(part, non_blocking=True)
            return self._recorded()

    def _recorded(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    @contextmanager
    def _queue(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield


def on_lanes(device: torch.device, work: Iterable[Callable[[Lane], T]]) -> list[T]:
    """What pieces of work give, each on a free lane of the device, several at once; in order.

    Each begins after what the device was told to do before. After an error what has not begun is left
    out; the first one, in order, is raised.
    """
    ready = told(device)

    def run(piece: Callable[[Lane], T]) -> T:
        with a_lane(device, ready) as lane:
            return piece(lane)

    with ThreadPoolExecutor(LANES, thread_name_prefix="lane") as pool:
        coming: list[Future[T]] = []
        try:
            for piece in work:
                coming.append(pool.submit(run, piece))
            return [each.result() for each in coming]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def told(device: torch.device) -> torch.cuda.Event | None:
    """What a device has been told to do by now; None on a CPU, which does it at once."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextmanager
def a_lane(device: torch.device, ready: torch.cuda.Event | None) -> Iterator[Lane]:
    """A free lane of a device, after the device has come to `ready`."""
    lanes = _lanes(device)
    lane = lanes.get()
    try:
        lane.after(ready)
        yield lane
    finally:
        lane.wait()
        lanes.put(lane)


def by_lanes(device: torch.device) -> bool:
    """Whether bytes from and to a device go on lanes; a CPU's go nowhere."""
    return device.type == "cuda"


def fill(device: torch.device, pairs: Iterable[tuple[Tensor, Tensor]], there: bool = False) -> None:
    """Copy each second tensor, of the host, into the first, as `copy_` does one after the other.

    there: they are on the device already.
    """
    if there or not by_lanes(device):
        for target, source in pairs:
            target.copy_(source)
        return
    again: list[tuple[Tensor, Tensor]] = []  # of memory that two names share, in order
    begun: set[int] = set()

    def work() -> Iterator[Callable[[Lane], None]]:
        for target, source in pairs:
            alike = target.dtype == source.dtype and target.shape == source.shape
            if target.data_ptr() in begun or not alike or not target.is_contiguous():
                again.append((target, source))
            else:
                begun.add(target.data_ptr())
                yield partial(_fill, target, source)

    on_lanes(device, work())
    for target, source in again:
        target.copy_(source)


def _fill(target: Tensor, source: Tensor, lane: Lane) -> None:
    lane.into(target, source)


@cache
def _lanes(device: torch.device) -> queue.SimpleQueue[Lane]:
    lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    for _ in range(LANES):
        lanes.put(Lane(device))
    return lanes


@dataclass(kw_only=True, slots=True)
class _Away:
    """A storage without memory."""

    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor | None  # its bytes [nbytes] on the host; None: they are gone


class Storages:
    """The memory below some tensors, on the device or not.

    What is given back is a tensor's storage: modules, optimizers and FSDP keep their references and
    views, and know nothing of it. Each comes back as the same object with the same bits.
    """

    def __init__(self) -> None:
        self._away: list[_Away] = []
        # Of copies from a GPU, by storage and size: pinning takes longer than copying, so they stay.
        self._pinned: dict[tuple[int, int], Tensor] = {}

    @property
    def away(self) -> bool:
        """Whether the tensors have no memory of the device now."""
        return bool(self._away)

    @property
    def on_host(self) -> int:
        """Bytes of the host that hold copies, or are kept for them."""
        plain = [entry.copy for entry in self._away if entry.copy is not None]
        copies = {id(copy): copy.nbytes for copy in [*plain, *self._pinned.values()]}
        return sum(copies.values())

    def put_away(self, tensors: Iterable[Tensor], *, keep: bool) -> Moved:
        """Give the memory below these tensors back; `keep`: copy it to the host first.

        Tensors that share memory are moved together; DTensors mean this rank's part. Nothing happens
        where tensors are away already. On a CPU memory that numpy shares stays.
        """
        began = time.monotonic()
        if self._away:
            return Moved()
        storages = {
            storage._cdata: storage
            for storage in (_local(tensor).untyped_storage() for tensor in tensors)
            if storage.nbytes() and storage.resizable()
        }
        away = [
            _Away(
                storage=storage,
                nbytes=storage.nbytes(),
                copy=self._copy(key, storage) if keep else None,
            )
            for key, storage in storages.items()
        ]
        _wait(storages.values())  # for copies under way, before their source is given away
        for entry in away:
            entry.storage.resize_(0)
        self._away = away
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the allocator's free memory, for vLLM for instance
        return Moved(nbytes=sum(entry.nbytes for entry in away), seconds=time.monotonic() - began)

    def bring_back(self) -> Moved:
        """Give the tensors memory again, with what was kept; else it has to be filled."""
        began = time.monotonic()
        for entry in self._away:
            entry.storage.resize_(entry.nbytes)
            if entry.copy is not None:
                _bytes(entry.storage).copy_(entry.copy, non_blocking=True)
        _wait(entry.storage for entry in self._away)
        moved = sum(entry.nbytes for entry in self._away)
        self._away = []
        return Moved(nbytes=moved, seconds=time.monotonic() - began)

    def _copy(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        if storage.device.type == "cpu":
            return _bytes(storage).clone()
        size = storage.nbytes()
        if (key, size) not in self._pinned:
            self._pinned[key, size] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._pinned[key, size].copy_(_bytes(storage), non_blocking=True)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of the bits of tensors on any device, and of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor).data)
    return digest.hexdigest()


def _local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    for device in {storage.device for storage in storages}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def register_with_cuda(address: int, nbytes: int) -> Unregister:
    """Pin memory; returns what unpins it. Raises RuntimeError where CUDA refuses."""
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(address, nbytes, 1))  # portable
    if error:
        with contextlib.suppress(RuntimeError):  # the next launch reports the error, and clears it
            torch.ones(1, device="cuda").add_(1)
        raise RuntimeError(f"CUDA does not register {nbytes} bytes of the host: error {error}")
    return partial(cudart.cudaHostUnregister, address)


@torch.no_grad()
def pin(tensors: Sequence[Tensor], register: Register = register_with_cuda) -> None:
    """Give tensors on the host memory that is pinned, all zeros; each stays the same object.

    torch's own pinned memory comes in powers of two, which for the moments of a 7B model is nearly
    twice their bytes, and one thread touches it. This is ordinary memory of exactly the bytes that
    are asked for, touched by several threads, in huge pages where there are such, and registered.

    DTensors mean this rank's part. Where CUDA does not register memory torch's own is taken, and
    where there is none the memory is used as it is, with a line in the log: copies are slower then.
    """
    for block in _blocks([part for part in map(_local, tensors) if part.numel()]):
        flat = _pinned(sum(map(_room, block)), register)
        start = 0
        for tensor in block:
            part = flat[start : start + tensor.nbytes]
            tensor.data = part.view(tensor.dtype).view(tensor.shape)
            start += _room(tensor)


class _Pages(mmap.mmap):
    """Memory that is unregistered before it is given back."""

    unregister: Unregister | None = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()


def _pinned(nbytes: int, register: Register) -> Tensor:
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(advice)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    _touch(flat.data_ptr(), nbytes)
    try:
        pages.unregister = register(flat.data_ptr(), nbytes)
    except RuntimeError as error:
        return _by_torch(nbytes, flat, error)
    return flat


def _by_torch(nbytes: int, plain: Tensor, why: RuntimeError) -> Tensor:
    """Memory that torch pins, of which it takes a power of two; `plain` where it cannot either."""
    try:
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).zero_()
    except RuntimeError:
        logger.warning("Memory is not pinned, so copies from and to the GPU are slow: %s", why)
        return plain
    logger.info("Memory is pinned by torch, up to twice as much: %s", why)
    return pinned


def _touch(address: int, nbytes: int) -> None:
    step = -(-nbytes // (THREADS * ALIGN)) * ALIGN
    with ThreadPoolExecutor(THREADS, thread_name_prefix="touch") as pool:
        for start in range(0, nbytes, step):
            pool.submit(ctypes.memset, address + start, 0, min(step, nbytes - start))


def _blocks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in order, gathered to at most BLOCK bytes."""
    blocks: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not blocks or size + _room(tensor) > BLOCK:
            blocks.append([])
            size = 0
        blocks[-1].append(tensor)
        size += _room(tensor)
    return blocks


def _room(tensor: Tensor) -> int:
    """Bytes of a block that a tensor takes."""
    return -(-tensor.nbytes // ALIGN) * ALIGN
