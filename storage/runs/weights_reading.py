"""The tensors of a policy version, read from the store and checked (see weights.py)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from storage.batches import tensors as torch_bytes
from storage.objects.digests import digest
from storage.objects.errors import ObjectDamaged
from storage.runs.weights import Manifest, TensorEntry, WeightsRef, open_manifest

if TYPE_CHECKING:
    import torch

    from storage.objects.store import Store

WINDOW_BYTES = 64 * 2**20  # read at once by `stream`; one window more is read ahead


def stream(
    store: Store, ref: WeightsRef, names: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version (or those `names`), in the order in which they were published.

    From local files they map the file's pages privately, without a copy; from elsewhere at most
    two windows of 64 MiB are held beside what the caller keeps. Each tensor's digest is checked:
    raises ObjectMissing, and ObjectDamaged naming the tensor.
    """
    manifest = open_manifest(store, ref)
    windows = _windows(manifest, names)
    for window, views in _read_ahead(store, ref.key, manifest, windows):
        for name in window:
            yield name, _tensor(ref.key, name, manifest.tensors[name], views.pop(name))


def _read_ahead(
    store: Store, key: str, manifest: Manifest, windows: list[list[str]]
) -> Iterator[tuple[list[str], dict[str, memoryview]]]:
    """The names and bytes of each window; of a remote store the next one is already coming."""
    if not store.backend.remote:  # mapping costs nothing
        for window in windows:
            yield window, _read(store, key, manifest, window)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
        coming = [pool.submit(_read, store, key, manifest, window) for window in windows[:1]]
        for number, window in enumerate(windows):
            views = coming.pop().result()
            for following in windows[number + 1 : number + 2]:
                coming.append(pool.submit(_read, store, key, manifest, following))
            yield window, views


def _windows(manifest: Manifest, wanted: Container[str] | None) -> list[list[str]]:
    """Names in order, gathered to about WINDOW_BYTES of one file."""
    windows: list[list[str]] = []
    held, file = WINDOW_BYTES, ""
    for name, entry in manifest.tensors.items():
        if wanted is not None and name not in wanted:
            continue
        if held >= WINDOW_BYTES or entry.file != file:
            windows.append([])
            held, file = 0, entry.file
        windows[-1].append(name)
        held += entry.nbytes
    return windows


def _read(store: Store, key: str, manifest: Manifest, names: list[str]) -> dict[str, memoryview]:
    entries = [manifest.tensors[name] for name in names]
    ranges = [(f"{key}/{entry.file}", entry.start, entry.stop) for entry in entries]
    return dict(zip(names, store.read_ranges(ranges), strict=True))


def _tensor(key: str, name: str, entry: TensorEntry, view: memoryview) -> torch.Tensor:
    where = f"tensor {name!r} of object {key}/{entry.file}"
    if view.nbytes < entry.nbytes:
        raise ObjectDamaged(f"The {where} is damaged: the object ends within it.")
    if digest(view) != entry.digest:
        raise ObjectDamaged(f"The {where} is damaged: its digest does not match.")
    import numpy as np

    values = np.frombuffer(bytearray(view) if view.readonly else view, np.uint8)
    return torch_bytes.tensor_of(values, entry.dtype, entry.shape)
