"""Snapshots of a trainer: torch.distributed.checkpoint over the store, as safetensors and JSON.

torch's own storage reads its metadata by pickle (https://github.com/pytorch/pytorch/issues/189308);
nothing is ever unpickled from the store, so the storage here keeps the same records in an index of
JSON. Every rank writes its shards as one object, and any number of ranks can read a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.futures import Future

from storage.batches.format import DTYPES, head_of
from storage.batches.tensors import bytes_of, code_of, dtype_of, tensor_of
from storage.objects import documents
from storage.objects.documents import digest
from storage.objects.errors import ObjectDamaged
from storage.runs.run_store import RunStore
from storage.runs.snapshots import INDEX, STATE_FORMAT, Piece, mark, read_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A piece of a tensor as it was written, and where its bytes are."""

    file: str  # within the snapshot's folder
    start: int
    stop: int
    dtype: str  # safetensors code
    shape: tuple[int, ...]  # of the piece
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeferredTensor:
    """A tensor in float32 that is made when it is its turn, so that not all are held at once."""

    like: Tensor  # of its shape, sharded as it is, of any values
    values: Callable[[], Tensor]
    place: Callable[[], Tensor]  # the same, to be filled
    take: Callable[[], None]  # called once what `place` made has been filled


def save_snapshot(
    files: RunStore,
    step: int,
    tensors: Mapping[str, Tensor | DeferredTensor],
    facts: Mapping[str, int],
    group: dist.ProcessGroup,
) -> None:
    """Write tensors (sharded or whole) and numbers as the snapshot after `step`; a collective."""
    writer = _Writer(files, step, dict(facts))
    shapes = {
        name: torch.empty_like(tensor.like, device="meta", dtype=torch.float32, requires_grad=False)
        if isinstance(tensor, DeferredTensor)
        else tensor
        for name, tensor in tensors.items()
    }
    planner = _SavePlanner(tensors)
    with _plain_errors():
        dcp.save(shapes, storage_writer=writer, planner=planner, process_group=group)


def load_snapshot(
    files: RunStore,
    step: int,
    tensors: Mapping[str, Tensor | DeferredTensor],
    group: dist.ProcessGroup,
) -> dict[str, int]:
    """Fill `tensors` in place from the snapshot after `step`; returns its numbers. A collective.

    Raises ObjectMissing where there is no such snapshot, ObjectDamaged, and RuntimeError (by torch)
    where a tensor is missing or of another shape, or has codes in place of numbers.
    """
    reader, planner = _Reader(files, step), _LoadPlanner(tensors)
    shapes = {
        name: tensor.like if isinstance(tensor, DeferredTensor) else tensor
        for name, tensor in tensors.items()
    }
    with _plain_errors():
        dcp.load(shapes, storage_reader=reader, planner=planner, process_group=group)
    planner.end()
    return reader.facts


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the first failed rank's own error.

    torch 2.13 wraps it in CheckpointException, which is a BaseException (not reported).
    """
    try:
        yield
    except CheckpointException as wrapped:
        error = next(iter(wrapped.failures.values()))[0]
        raise error from None


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, tensors: Mapping[str, Tensor | DeferredTensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written, made now where it is computed."""
        tensor = self._tensors[index.fqn]
        value = tensor.values() if isinstance(tensor, DeferredTensor) else tensor
        return find_state_dict_object({index.fqn: value}, index)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, tensors: Mapping[str, Tensor | DeferredTensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._filled: dict[str, Tensor] = {}  # the one whose pieces are read now

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """What is filled; of computed ones one at a time, as a tensor's pieces come together."""
        tensor = self._tensors[index.fqn]
        if isinstance(tensor, DeferredTensor) and index.fqn not in self._filled:
            self.end()
            self._filled = {index.fqn: tensor.place()}
        value = self._filled[index.fqn] if isinstance(tensor, DeferredTensor) else tensor
        return cast("Tensor", find_state_dict_object({index.fqn: value}, index))

    def end(self) -> None:
        """All of the last one has been filled."""
        for name in self._filled:
            tensor = self._tensors[name]
            assert isinstance(tensor, DeferredTensor)
            tensor.take()
        self._filled = {}


class _Writer(StorageWriter):
    def __init__(self, files: RunStore, step: int, facts: dict[str, int]) -> None:
        self._files, self._step, self._facts = files, step, facts
        self._folder = files.state_key(step)

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing to forget: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to open."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            SavePlan(plan.items, storage_data=f"rank-{rank:05d}.safetensors", usable=plan.usable)
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream this rank's pieces into one safetensors object."""
        header: dict[str, object] = {}
        end = 0
        for number, item in enumerate(plan.items):
            assert item.type is not WriteItemType.BYTE_IO and item.tensor_data is not None
            shape = list(item.tensor_data.chunk.sizes)
            code = code_of(item.tensor_data.properties.dtype)
            size = DTYPES[code][0] * int(torch.Size(shape).numel())
            header[f"{number:06d}.{item.index.fqn}"] = {
                "dtype": code,
                "shape": shape,
                "data_offsets": [end, end + size],
            }
            end += size
        head = head_of(header)
        results = []
        with self._files.store.write_stream(f"{self._folder}/{plan.storage_data}") as out:
            out.write(head)
            place = len(head)
            for item in plan.items:
                tensor = cast("Tensor", planner.resolve_data(item)).detach()
                data = bytes_of(tensor).data
                if data.nbytes:
                    out.write(data)
                chunk = Chunk(
                    file=plan.storage_data,
                    start=place,
                    stop=place + data.nbytes,
                    dtype=code_of(tensor.dtype),
                    shape=tuple(tensor.shape),
                    digest=digest(data),
                )
                place = chunk.stop
                results.append(
                    WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=chunk)
                )
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and then the marker, on rank 0 after every rank's data."""
        chunks: dict[str, list[dict[str, object]]] = {}
        for result in (result for rank in results for result in rank):
            chunk: Chunk = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(
                {
                    "offsets": list(result.index.offset or ()),
                    "shape": list(chunk.shape),
                    "dtype": chunk.dtype,
                    "file": chunk.file,
                    "bytes": [chunk.start, chunk.stop],
                    "digest": chunk.digest,
                }
            )
        tensors = {
            name: {"shape": list(entry.size), "chunks": chunks[name]}
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        body = {"facts": self._facts, "tensors": tensors}
        key = f"{self._folder}/{INDEX}"
        self._files.store.write(key, documents.encode(STATE_FORMAT, body))
        # The index has a digest of every piece, so the marker need not read the files back.
        mark(self._files, self._step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Not addressed by a path."""
        return False

    def storage_meta(self) -> None:
        """No metadata of the storage's own."""


class _Reader(StorageReader):
    def __init__(self, files: RunStore, step: int) -> None:
        self._store, self._folder = files.store, files.state_key(step)
        # Raises ObjectMissing for a snapshot that was not finished.
        self._state = read_state(files.store, self._folder)
        self.facts = self._state.facts
        self._chunks: dict[MetadataIndex, Piece] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing to forget: a reader is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the index says, in torch's words."""
        entries: dict[str, Any] = {}
        for name, entry in self._state.tensors.items():
            pieces = []
            for piece in entry.chunks:
                offsets = torch.Size(piece.offsets or [0] * len(entry.shape))
                pieces.append(ChunkStorageMetadata(offsets, torch.Size(piece.shape)))
                self._chunks[MetadataIndex(name, offsets)] = piece
            entries[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype_of(entry.chunks[0].dtype)),
                torch.Size(entry.shape),
                pieces,
            )
        return Metadata(state_dict_metadata=entries)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """On ranks that were handed the metadata, the pieces are still to be learnt."""
        if not self._chunks:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the pieces that this rank needs, each checked."""
        for item in plan.items:
            index = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
            chunk = self._chunks[index]
            key = f"{self._folder}/{chunk.file}"
            first, last = chunk.place
            view = self._store.read_ranges([(key, first, last)])[0]
            if view.nbytes < last - first or digest(view) != chunk.digest:
                raise ObjectDamaged(
                    f"The piece of {item.storage_index.fqn!r} in object {key} is damaged: its "
                    "digest does not match."
                )
            whole = tensor_of(np.frombuffer(bytearray(view), np.uint8), chunk.dtype, chunk.shape)
            places = zip(item.storage_offsets, item.lengths, strict=True)
            piece = whole[tuple(slice(start, start + length) for start, length in places)]
            target = planner.resolve_tensor(item).detach()
            if target.is_floating_point() != piece.is_floating_point():
                raise RuntimeError(
                    f"{item.storage_index.fqn} is in {piece.dtype} in object {key}, and "
                    f"{target.dtype} is asked for. Set train.optimizer_dtype to what it was."
                )
            target.copy_(piece)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Not addressed by a path."""
        return False
