"""Two buffers that a trainer fills and receivers on the same device read.

On a GPU by CUDA IPC; on a CPU they are a file in memory that has no name, so that nothing stays
behind when the trainer is killed, and whose pages receivers of the same machine map.
"""

from __future__ import annotations

import base64
import mmap
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.weight_transfer.offer import BUFFERS, TransferFailed

_of_this_process: dict[str, list[Tensor]] = {}  # CUDA lets nobody open a handle of its own


def place_of(device: torch.device) -> str:
    """What two processes must have in common to share a device's memory."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_properties(device).uuid}"
    return f"machine {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {_pids()}"


def _pids() -> str:
    """Of which processes this one knows the numbers: a container has its own."""
    return os.readlink("/proc/self/ns/pid")


class SharedBuffers:
    """Those of a trainer's rank."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """`nbytes`: of each."""
        self._name, self._file = uuid.uuid4().hex, -1
        if device.type == "cuda":
            self.buffers = [
                torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)
            ]
        else:
            self._file = os.memfd_create("refrain-weights", os.MFD_CLOEXEC)
            os.ftruncate(self._file, BUFFERS * nbytes)
            self.buffers = _mapped(self._file, nbytes)
        self._nbytes = nbytes
        _of_this_process[self._name] = self.buffers

    def handle(self) -> dict[str, Any]:
        """By which a receiver opens them; JSON."""
        handle: dict[str, Any] = {
            "name": self._name,
            "process": [_pids(), os.getpid()],
            "nbytes": self._nbytes,
        }
        if self._file >= 0:
            return handle | {"file": self._file}
        return handle | {"cuda": [_plain(buffer) for buffer in self.buffers]}

    def close(self) -> None:
        """Give the memory back; who has opened it keeps it."""
        _of_this_process.pop(self._name, None)
        if self.buffers and self.buffers[0].device.type == "cuda":
            self.buffers = []
            torch.cuda.ipc_collect()  # what receivers have let go of
        self.buffers = []
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_shared(handle: dict[str, Any], device: torch.device) -> list[Tensor]:
    """The buffers of another process, or of this one. TransferFailed where they cannot be opened."""
    if handle["process"] == [_pids(), os.getpid()]:
        if handle["name"] not in _of_this_process:
            raise TransferFailed("the trainer's buffers are gone")
        return _of_this_process[handle["name"]]
    try:
        if "cuda" in handle:
            return [_opened(each, device) for each in handle["cuda"]]
        file = os.open(f"/proc/{handle['process'][1]}/fd/{handle['file']}", os.O_RDWR)
    except (OSError, RuntimeError) as error:
        raise TransferFailed(f"the trainer's buffers cannot be opened: {error}") from error
    try:
        return _mapped(file, handle["nbytes"])
    finally:
        os.close(file)


def _mapped(file: int, nbytes: int) -> list[Tensor]:
    pages = mmap.mmap(file, BUFFERS * nbytes)
    return list(torch.frombuffer(pages, dtype=torch.uint8).split(nbytes))


def _plain(buffer: Tensor) -> list[Any]:
    """CUDA's handle of a buffer as torch.multiprocessing has it; its first part is the device."""
    parts = buffer.untyped_storage()._share_cuda_()
    return [
        {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part
        for part in parts
    ]


def _opened(plain: list[Any], device: torch.device) -> Tensor:
    parts = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in plain]
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *parts[1:])
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
