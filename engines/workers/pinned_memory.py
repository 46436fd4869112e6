"""The host's memory that a GPU reads and writes by itself, at the speed of the bus.

torch's own pinned memory comes in powers of two, which for the moments of a 7B model is nearly twice
their bytes, and one thread touches it. Here it is ordinary memory of exactly the bytes that are
asked for, touched by several threads, in huge pages where there are such, and registered with CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

BLOCK = 2**30  # bytes registered at once; a larger tensor is a block of its own
ALIGN = 4096  # bytes; a tensor in a block begins at a multiple
THREADS = 8  # that touch a block

Unregister = Callable[[], object]
Register = Callable[[int, int], Unregister]  # of an address and bytes


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

    DTensors mean this rank's part. Where CUDA does not register memory torch's own is taken, and
    where there is none the memory is used as it is, with a line in the log: copies are slower then.
    """
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    for block in _blocks([tensor for tensor in own if tensor.numel()]):
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
        made = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).zero_()
    except RuntimeError:
        logger.warning("Memory is not pinned, so copies from and to the GPU are slow: %s", why)
        return plain
    logger.info("Memory is pinned by torch, up to twice as much: %s", why)
    return made


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
