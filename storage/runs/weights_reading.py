"""The tensors of a policy version, read from the store and checked (see weights.py)."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from storage.batches import tensors as torch_bytes
from storage.batches.format import DTYPES
from storage.objects.backends import Range
from storage.objects.documents import digest
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.runs.tensor_changes import decode
from storage.runs.weights import (
    MANIFEST,
    BaseVersion,
    Manifest,
    TensorEntry,
    WeightsRef,
    open_chain,
    open_manifest,
)

if TYPE_CHECKING:
    import torch

    from storage.objects.node_cache import NodeCache
    from storage.objects.store import Store

logger = logging.getLogger(__name__)

PATIENCE = 600.0  # seconds in which a version that was announced is in the store
Share = tuple[int, int]  # number of a reader, and how many there are
ALL: Share = (0, 1)
LOOKS = (0.1, 2.0)  # seconds between looks for it: at first, and at most
WINDOW_BYTES = 64 * 2**20  # read at once by `stream`; one window more is read ahead
THREADS = 8  # that check windows of local files


def wait_until_readable(
    store: Store, ref: WeightsRef, cache: NodeCache, patience: float = PATIENCE
) -> float:
    """Wait for a version that goes to the store behind its writer's machine; returns the seconds.

    None where this is the machine and all of it is here. Raises ObjectMissing, `patience` seconds
    later, where it does not come.
    """
    began, (pause, longest) = time.monotonic(), LOOKS
    while not (here := _is_here(cache, ref)) and not store.exists(f"{ref.key}/{MANIFEST}"):
        if (waited := time.monotonic() - began) > patience:
            raise ObjectMissing(
                f"Policy version {ref.version} ({ref.key}) is not in the store {waited:.0f} s after "
                "it was announced: its trainer ended, or does not reach the store."
            )
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    if not here and cache.has(f"{ref.key}/{MANIFEST}"):
        logger.warning("%s is read from the store: this machine has lost a part of it", ref.key)
    return time.monotonic() - began


def _is_here(cache: NodeCache, ref: WeightsRef) -> bool:
    manifest = f"{ref.key}/{MANIFEST}"
    if not cache.has(manifest):
        return False
    try:
        found = open_manifest(cache, ref)
    except ObjectDamaged:  # of an attempt that was given up
        cache.forget(manifest)
        return False
    files = {entry.file for entry in found.tensors.values()}
    return all(cache.has(f"{ref.key}/{file}") for file in files)


class BaseTensors:
    """The tensors of a whole version, from which others are stored as the difference."""

    def __init__(self, store: Store, base: BaseVersion, cache: NodeCache | None = None) -> None:
        self.base = base
        self._source = cache or store
        self.entries = open_manifest(self._source, base).tensors

    def read(self, name: str) -> np.ndarray:
        """A tensor's bytes [bytes] uint8, checked. Raises ObjectMissing, ObjectDamaged."""
        entry = self.entries[name]
        where = (f"{self.base.key}/{entry.file}", entry.start, entry.stop)
        view = self._source.read_ranges([where])[0]
        return _checked(self.base.key, name, entry, np.frombuffer(view, np.uint8))


def stream(
    store: Store,
    ref: WeightsRef | BaseVersion,
    names: Container[str] | None = None,
    cache: NodeCache | None = None,
    share: Share = ALL,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version (or those `names`), in the order in which they were published.

    From local files they map the file's pages privately, without a copy; from elsewhere at most
    two windows of 64 MiB are held beside what the caller keeps. So are they of a version that is
    stored as the difference from its base. Each tensor's digest is checked: raises ObjectMissing,
    and ObjectDamaged naming the tensor.

    cache: what this machine keeps of the store, which is read in the store's place. share: which
    tensors are checked, where several processes map the same local files at once and check them
    together; others' pages are touched only where the caller does.

    Of an adapter they are its factors (engines/models/adapters.py merges them).
    """
    version = _Version(store, ref, cache, share)
    for window in _read_ahead(version, _windows(version.manifest, names)):
        yield from window


class _Version:
    """A version with what it takes to read its tensors."""

    def __init__(
        self, store: Store, ref: WeightsRef | BaseVersion, cache: NodeCache | None, share: Share
    ) -> None:
        self.key = ref.key
        chain = open_chain(cache or store, ref)
        self.manifest = chain[0][1]
        self._base = chain[1] if len(chain) > 1 else None
        self._store, self._cache = store, cache
        number, readers = share
        self._mine = frozenset(islice(self.manifest.tensors, number, None, readers))
        # What is read or made, and not mapped, takes memory: one window is ahead then.
        forms = {entry.form for entry in self.manifest.tensors.values()}
        self.slow = store.backend.remote or "changed" in forms

    def read(self, names: list[str]) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a window, checked."""
        if self._cache is None:
            return self._read(names, self._store)
        try:
            return self._read(names, self._cache)
        except ObjectDamaged:  # perhaps on this machine alone
            for folder, manifest in filter(None, ((self.key, self.manifest), self._base)):
                for file in manifest.files:
                    self._cache.forget(f"{folder}/{file}")
            return self._read(names, self._store)

    def _read(self, names: list[str], source: Store | NodeCache) -> list[tuple[str, torch.Tensor]]:
        ranges = [self._range(self.key, self.manifest.tensors[name]) for name in names]
        from_base = [name for name in names if self.manifest.tensors[name].form != "whole"]
        ranges += [self._range(*self._in_base(name)) for name in from_base]
        views = source.read_ranges(ranges)
        base = dict(zip(from_base, views[len(names) :], strict=True))
        return [
            (name, self._tensor(name, view, base.get(name)))
            for name, view in zip(names, views, strict=False)
        ]

    @staticmethod
    def _range(key: str, entry: TensorEntry) -> Range:
        return f"{key}/{entry.file}", entry.start, entry.stop

    def _in_base(self, name: str) -> tuple[str, TensorEntry]:
        """Folder and place of a tensor in the base."""
        mine = self.manifest.tensors[name]
        if self._base is not None:
            key, base = self._base
            found = base.tensors.get(name)
            if (
                found is not None
                and found.form == "whole"
                and (found.dtype, found.shape) == (mine.dtype, mine.shape)
            ):
                return key, found
        raise ObjectDamaged(
            f"The tensor {name!r} of {self.key} is stored as a difference, but its base has none "
            "from which it could be one."
        )

    def _tensor(self, name: str, view: memoryview, base: memoryview | None) -> torch.Tensor:
        entry = self.manifest.tensors[name]
        if view.nbytes < entry.stop - entry.start:
            raise ObjectDamaged(
                f"The {_where(self.key, name, entry)} is damaged: the object ends within it."
            )
        values = np.frombuffer(view, np.uint8)
        if base is not None:
            before = np.frombuffer(base, np.uint8)
            values = before if entry.form == "same" else self._changed(name, view, before)
        if name in self._mine:
            _checked(self.key, name, entry, values)
        if not values.flags.writeable:
            values = values.copy()
        return torch_bytes.tensor_of(values, entry.dtype, entry.shape)

    def _changed(self, name: str, view: memoryview, before: np.ndarray) -> np.ndarray:
        entry = self.manifest.tensors[name]
        try:
            return decode(view, before, DTYPES[entry.dtype][0])
        except ObjectDamaged as error:
            where = _where(self.key, name, entry)
            raise ObjectDamaged(f"The {where} is damaged: {error}.") from error


def _read_ahead(
    version: _Version, windows: list[list[str]]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors of each window; while the caller has one, the next are already coming.

    Of what is read from elsewhere the next one; of local files, which are mapped, several at once.
    """
    ahead = 1 if version.slow else min(THREADS, os.cpu_count() or 1)
    waiting = iter(windows)
    with ThreadPoolExecutor(ahead, thread_name_prefix="weights") as pool:
        coming = deque(pool.submit(version.read, window) for window in islice(waiting, ahead))
        try:
            while coming:
                found = coming.popleft().result()
                coming.extend(pool.submit(version.read, window) for window in islice(waiting, 1))
                yield found
        finally:  # the caller may have had enough
            for each in coming:
                each.cancel()


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


def _checked(key: str, name: str, entry: TensorEntry, values: np.ndarray) -> np.ndarray:
    """`values` if they are the tensor's bytes."""
    if digest(values.data) != entry.digest:
        why = (
            "its digest does not match"
            if entry.form == "whole"
            else "with its base, its digest does not match"
        )
        raise ObjectDamaged(f"The {_where(key, name, entry)} is damaged: {why}.")
    return values


def _where(key: str, name: str, entry: TensorEntry) -> str:
    return f"tensor {name!r} of object {key}/{entry.file}"
