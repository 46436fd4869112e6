"""Ways of bytes between a GPU and the host's memory, each for one thread.

A lane has a stream and two pieces of pinned memory of its own: while one is read or filled, the
other is on the bus. Several lanes hash and write, or read and hash, at several times the speed of
one thread. They are made once for a device and stay.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from storage.batches.tensors import bytes_of

LANES = 8  # of a device
PIECE = 16 * 2**20  # bytes that are on their way at a time

T = TypeVar("T")


class Lane:
    """A way to and from one device; used by one thread at a time."""

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
    lanes, ready = _lanes(device), None
    if device.type == "cuda":
        ready = torch.cuda.current_stream(device).record_event()

    def run(one: Callable[[Lane], T]) -> T:
        lane = lanes.get()
        try:
            lane.after(ready)
            return one(lane)
        finally:
            lane.wait()
            lanes.put(lane)

    with ThreadPoolExecutor(LANES, thread_name_prefix="lane") as pool:
        coming: list[Future[T]] = []
        try:
            for one in work:
                coming.append(pool.submit(run, one))
            return [each.result() for each in coming]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def by_lanes(device: torch.device) -> bool:
    """Whether bytes from and to a device go on lanes; a CPU's go nowhere."""
    return device.type == "cuda"


def fill(device: torch.device, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor, of the host, into the first, as `copy_` does one after the other."""
    if not by_lanes(device):
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
    found: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    for _ in range(LANES):
        found.put(Lane(device))
    return found
