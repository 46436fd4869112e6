"""Versions that are stored as the difference from a whole one: which, and how they are written.

Why so, and when it pays: docs/decisions/delta-versions.md. weights_reading.py reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from storage.batches import tensors as torch_bytes
from storage.batches.format import DTYPES
from storage.objects.documents import Digester, digest
from storage.runs.run_store import RunStore
from storage.runs.tensor_changes import encode
from storage.runs.weights import (
    BaseVersion,
    FileEntry,
    Form,
    TensorEntry,
    TensorOutline,
    WeightFile,
    find_manifest,
)
from storage.runs.weights_reading import BaseTensors

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Buffer

    from storage.objects.store import Store

WORTHWHILE = 0.5  # of a tensor's bytes; a larger difference takes long to make and to read


def base_for(
    run: RunStore, version: int, outlines: Mapping[str, TensorOutline], every: int
) -> BaseVersion | None:
    """The version from which the next one is to be stored as the difference; None: store it whole.

    It is the run's last whole one, so that two versions at most are read for one. Whole are every
    `every`-th version, those with no version before them that is made of the same tensors, and those
    after a difference that was hardly smaller than the whole.
    """
    if every == 1 or version == 0:
        return None
    before = find_manifest(run.store, run.weights_key(version - 1))
    if before is None:
        return None
    stored = sum(file.nbytes for file in before.files.values())
    if before.base is not None and stored > WORTHWHILE * before.nbytes:
        return None
    base = before.base or BaseVersion(key=run.weights_key(version - 1), digest=before.digest)
    whole = find_manifest(run.store, base.key)
    if whole is None or whole.base is not None or version - whole.version >= every:
        return None
    own = base.key == run.weights_key(whole.version)  # a fork's first base is its parent's
    there = {name: (entry.dtype, entry.shape) for name, entry in whole.tensors.items()}
    wanted = {name: (one.dtype, one.shape) for name, one in outlines.items()}
    return base if own and there == wanted else None


def changes_name(number: int, token: str) -> str:
    """No name that a library would take for weights: alone the file means nothing."""
    return f"changes-{number + 1:05d}-{token}.delta"


def write_changes(
    store: Store,
    key: str,
    file: str,
    outlines: Mapping[str, TensorOutline],
    tensors: Iterable[tuple[str, torch.Tensor]],
    base: BaseTensors,
) -> WeightFile:
    """`write_shard` of a version that is stored as the difference from its base."""
    total, entries, place = Digester(), {}, 0
    with store.write_stream(f"{key}/{file}") as out:
        for (wanted, one), (name, tensor) in zip(outlines.items(), tensors, strict=True):
            data = torch_bytes.bytes_of(tensor)
            assert (name, data.nbytes) == (wanted, one.nbytes)
            found = digest(data.data)
            form: Form = "same"
            pieces: list[Buffer] = []
            if found != base.entries[name].digest:
                form, pieces = _changes(data, base.read(name), DTYPES[one.dtype][0])
            start = place
            for piece in pieces:
                out.write(piece)
                total.update(piece)
                place += memoryview(piece).nbytes
            entries[name] = TensorEntry(
                file=file,
                dtype=one.dtype,
                shape=one.shape,
                start=start,
                stop=place,
                digest=found,
                form=form,
            )
    entry = FileEntry(nbytes=place, digest=total.digest())
    return WeightFile(name=file, file=entry, tensors=entries)


def _changes(new: np.ndarray, old: np.ndarray, itemsize: int) -> tuple[Form, list[Buffer]]:
    pieces: list[Buffer] = [*encode(new, old, itemsize)]
    if sum(memoryview(piece).nbytes for piece in pieces) < WORTHWHILE * new.nbytes:
        return "changed", pieces
    return "whole", [new.data]
