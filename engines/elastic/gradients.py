"""A unit's gradient as a stored object, and the sum of many, tensor by tensor.

With g_u the sum over the tokens of unit u of the gradient of its loss, already divided by the counts
of the whole mini-batch (engines/algorithms/aggregation.py), the gradient of the mini-batch is

    g = ((g_0 + g_1) + g_2) + …

in float32 and in the order of the units, whoever computed them and whenever they came.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums
from engines.train.contract import MadeOn
from engines.train.updater import Tally
from storage.batches import tensors as torch_bytes
from storage.objects.documents import digest
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.runs.gradients import Gradient, GradientsOf, UnitMetrics, check_open, unit_key
from storage.runs.run_store import RunStore
from storage.runs.weights import weights_digest
from storage.runs.weights_writing import outline_of, write_shard


def write_gradient(
    files: RunStore,
    folder: str,
    of: GradientsOf,
    unit: int,
    rows: str,
    gradients: Mapping[str, Tensor],
    dtype: torch.dtype,
    made_on: MadeOn,
    metrics: UnitMetrics,
) -> tuple[Gradient, bool]:
    """Leave a unit's gradient: its tensors, then its marker. The first marker stands.

    Returns the one that stands, and whether it has the same bits as this one.

    Args:
        files: Of the run.
        folder: Of the optimizer step.
        of: What it is of. Raises GradientsRefused where that is not wanted (any more).
        unit: Its number.
        rows: Key of its row numbers.
        gradients: By parameter, as they are summed; each is cast as it is written.
        dtype: In which they are stored.
        made_on: On what they were computed.
        metrics: Of the unit.
    """
    check_open(files.store, folder, of)
    outlines = {name: outline_of(tensor, dtype) for name, tensor in gradients.items()}
    file = f"{unit:05d}-{uuid.uuid4().hex[:8]}.safetensors"
    cast = ((name, tensor.to(dtype)) for name, tensor in gradients.items())
    part = write_shard(files.store, folder, file, outlines, cast)
    gradient = Gradient(
        of=of,
        unit=unit,
        rows=rows,
        device=made_on.device,
        torch=made_on.torch,
        fixed=made_on.fixed,
        file=file,
        nbytes=part.file.nbytes,
        digest=weights_digest((n, e.dtype, e.shape, e.digest) for n, e in part.tensors.items()),
        tensors=part.tensors,
        metrics=metrics,
    )
    try:
        check_open(files.store, folder, of)  # it may have taken minutes
        record = files.finish(unit_key(folder, unit), gradient.model_dump(mode="json"))
    except BaseException:
        files.store.delete([f"{folder}/{file}"])
        raise
    standing = Gradient.model_validate(record)
    if standing.file != file:
        files.store.delete([f"{folder}/{file}"])
    return standing, standing.digest == gradient.digest


def unit_metrics(tally: Tally, finite: bool) -> UnitMetrics:
    """What a unit adds to the metrics, to the bit."""
    sums = tally.sums
    return UnitMetrics(
        means={n: (_hex(pair[0]), _hex(pair[1])) for n, pair in sums.means.items()},
        sums={n: _hex(value) for n, value in sums.sums.items()},
        maxima={n: _hex(value) for n, value in sums.maxima.items()},
        finite=finite,
        tokens=tally.tokens,
        whole=tally.whole,
        responses=tally.responses,
        flops=tally.flops,
    )


def metric_sums(metrics: UnitMetrics) -> MetricSums:
    """The additive metrics of a unit, in float32 as they were made."""
    return MetricSums(
        means={n: torch.tensor([_number(x) for x in pair]) for n, pair in metrics.means.items()},
        sums={n: torch.tensor(_number(value)) for n, value in metrics.sums.items()},
        maxima={n: torch.tensor(_number(value)) for n, value in metrics.maxima.items()},
    )


def _hex(value: Tensor) -> str:
    return float(value).hex()


def _number(text: str) -> float:
    return float.fromhex(text)


class Damaged(RuntimeError):
    """A unit's tensor is not there, or not the one that was written."""

    def __init__(self, unit: int, why: str) -> None:
        super().__init__(why)
        self.unit = unit


class Summed:
    """The sum of the gradients of units, a tensor at a time.

    `first` adds a tensor up and keeps the sum in a file of this machine, `again` reads it from there:
    so each gradient is read once, and the sum, the tensor that is added to it and its bytes as they
    were read are all that is in memory, of however many units.
    """

    def __init__(
        self,
        files: RunStore,
        folder: str,
        gradients: Sequence[Gradient],
        device: torch.device,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`gradients`: in the order in which they are added. `shapes`: of the parameters; None: all
        that a gradient must be is of the shape of the one before it.
        """
        self._shapes = {name: tuple(shape) for name, shape in (shapes or {}).items()}
        self._store = files.store
        self._folder = folder
        self._gradients = gradients
        self._device = device
        self._scratch = tempfile.TemporaryFile(prefix="refrain-")  # noqa: SIM115
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}  # start, shape
        self._end = 0
        self.nbytes = 0  # read from the store

    def __enter__(self) -> Summed:
        return self

    def __exit__(self, *error: object) -> None:
        self._scratch.close()

    def first(self, name: str) -> Tensor | None:
        """The sum of a parameter's gradients, float32; None where no unit has one.

        Raises Damaged, naming the unit.
        """
        total: Tensor | None = None
        for part in self._parts(name):
            if total is None:
                total = part.to(self._device, torch.float32, copy=True)
            else:
                total += part.to(self._device)
        if total is None:
            return None
        data = torch_bytes.bytes_of(total)
        self._places[name] = (self._end, tuple(total.shape))
        self._scratch.seek(self._end)
        self._scratch.write(data.data)
        self._end += data.nbytes
        return total

    def again(self, name: str) -> Tensor:
        """The same sum once more, to be used up."""
        start, shape = self._places[name]
        total = torch.empty(shape, dtype=torch.float32)
        self._scratch.seek(start)
        if total.numel():
            self._scratch.readinto(torch_bytes.bytes_of(total).data)
        return total.to(self._device)

    def _parts(self, name: str) -> Iterator[Tensor]:
        """What each unit has of a parameter, checked; one at a time."""
        for gradient in self._gradients:
            entry = gradient.tensors.get(name)
            if entry is None:
                continue
            key = f"{self._folder}/{gradient.file}"
            shape = self._shapes.setdefault(name, entry.shape)
            if entry.shape != shape:  # of another one, torch may make copies without a word
                raise Damaged(
                    gradient.unit,
                    f"The tensor {name!r} of object {key} has the shape {list(entry.shape)}, not "
                    f"{list(shape)}.",
                )
            try:
                view = self._store.read_ranges([(key, entry.start, entry.stop)])[0]
            except (ObjectMissing, ObjectDamaged) as error:
                raise Damaged(gradient.unit, str(error)) from error
            if view.nbytes != entry.stop - entry.start or digest(view) != entry.digest:
                raise Damaged(
                    gradient.unit,
                    f"The tensor {name!r} of object {key} is damaged: its digest does not match.",
                )
            self.nbytes += view.nbytes
            values = np.frombuffer(view, np.uint8)
            if not values.flags.writeable:
                values = values.copy()  # torch has no tensors that cannot be written to
            yield torch_bytes.tensor_of(values, entry.dtype, entry.shape)
