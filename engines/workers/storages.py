"""Tensors off their device and back, each the same object with the same bits.

What is given back is the memory below a tensor, its storage: modules, optimizers and FSDP keep their
references and views, and know nothing of it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.workers.messages import Moved
from storage.batches.tensors import bytes_of


@dataclass(kw_only=True, slots=True)
class _Away:
    """A storage without memory."""

    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor | None  # its bytes [nbytes] on the host; None: they are gone


class Storages:
    """The memory below some tensors, on the device or not."""

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
        plain = [one.copy for one in self._away if one.copy is not None]
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
        found = {
            own.untyped_storage()._cdata: own.untyped_storage()
            for own in map(_own, tensors)
            if own.untyped_storage().nbytes() and own.untyped_storage().resizable()
        }
        away = [
            _Away(
                storage=storage,
                nbytes=storage.nbytes(),
                copy=self._copy(key, storage) if keep else None,
            )
            for key, storage in found.items()
        ]
        _wait(found.values())  # for copies under way, before their source is given away
        for one in away:
            one.storage.resize_(0)
        self._away = away
        _release()
        return Moved(nbytes=sum(one.nbytes for one in away), seconds=time.monotonic() - began)

    def bring_back(self) -> Moved:
        """Give the tensors memory again, with what was kept; else it has to be filled."""
        began = time.monotonic()
        for one in self._away:
            one.storage.resize_(one.nbytes)
            if one.copy is not None:
                _bytes(one.storage).copy_(one.copy, non_blocking=True)
        _wait(one.storage for one in self._away)
        moved = sum(one.nbytes for one in self._away)
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
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(bytes_of(tensor).data)
    return found.hexdigest()


def _own(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    for device in {storage.device for storage in storages}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _release() -> None:
    """Give the allocator's free memory to other processes, vLLM's for instance."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
