"""Gradients that workers leave for the aggregator while an optimizer step is under way.

<run>/gradients/<step>/weights-<digest>/, what they are computed with, as a policy version is stored
<run>/gradients/<step>/<trained step>.<optimizer step>-<key>/
    open.json, a ticket: they are wanted
    <unit>-<token>.safetensors, the tensors of a unit
    <unit>.json, its marker, written last; the first stands

`<step>` is the one that is not committed yet; what is trained may be an earlier one that is made
again. All of a step goes once it is committed, tickets and markers first. Written and read by
engines/elastic/; nothing here imports torch.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from storage.objects import documents
from storage.objects.backends import StoredKey
from storage.objects.documents import StoredRecord
from storage.objects.errors import ObjectMissing
from storage.objects.store import Store
from storage.runs.run_store import DATA_SUFFIX, RunStore
from storage.runs.weights import TensorEntry, check_places

TICKET_FORMAT = "refrain.gradients/1"
TICKET = "open.json"


class GradientsRefused(RuntimeError):
    """A gradient that is not wanted: of another step, of other weights, or too late. Names it."""


class GradientsOf(StoredRecord):
    """What the gradients of an optimizer step are of; they add up where all this is the same."""

    run: str
    step: int  # RL step whose batch trains
    optimizer_step: int  # within the step, from 0
    weights: str  # digest of those that they are computed with, in the number format of products
    inputs: str  # key of batch, algorithm and settings

    def difference(self, other: GradientsOf) -> str | None:
        """The first field in which another one is not the same, in words; None: it is."""
        for name in type(self).model_fields:
            value, its = dict(self)[name], dict(other)[name]
            if value != its:
                return f"its {name.replace('_', ' ')} is {its}, not {value}"
        return None


class UnitMetrics(StoredRecord):
    """What a unit adds to the metrics of an update; floats that may be infinite as `float.hex`."""

    means: dict[str, tuple[str, str]]  # name -> sum and count
    sums: dict[str, str]
    maxima: dict[str, str]
    finite: bool  # whether every loss was
    tokens: int  # of forward passes
    whole: int  # what they would be if rows shared nothing
    responses: int  # response tokens
    flops: float  # forward and backward

    @model_validator(mode="after")
    def _are_numbers(self) -> Self:
        pairs = (text for pair in self.means.values() for text in pair)
        for text in (*pairs, *self.sums.values(), *self.maxima.values()):
            try:
                float.fromhex(text)
            except (ValueError, OverflowError):
                raise ValueError(f"{text!r:.40} is no number of a metric") from None
        return self


class Gradient(StoredRecord):
    """The marker of a unit: the sum of its tokens' gradients is there."""

    of: GradientsOf
    unit: int  # number within the optimizer step
    rows: str  # key of its row numbers
    device: str  # on which it was computed
    torch: str  # version
    fixed: bool  # whether its sums had a fixed order
    file: StoredKey  # within the folder
    nbytes: int  # of the file
    digest: str  # of names, types, shapes and bytes of all tensors
    tensors: dict[str, TensorEntry]
    metrics: UnitMetrics

    @model_validator(mode="after")
    def _tensors_lie_apart(self) -> Self:
        check_places(self.tensors, {self.file: self.nbytes})
        return self


def gradients_key(run: RunStore, step: int) -> str:
    """The folder of a step that is not committed yet."""
    return f"{run.run}/gradients/{step:06d}"


def unit_key(folder: str, unit: int) -> str:
    """Under which a unit's result is finished; the file with the tensors has a longer name."""
    return f"{folder}/{unit:05d}{DATA_SUFFIX}"


def open_folder(store: Store, folder: str, of: GradientsOf) -> None:
    """Say that gradients are wanted in a folder."""
    body = of.model_dump(mode="json")
    store.write(f"{folder}/{TICKET}", documents.encode(TICKET_FORMAT, body))


def check_open(store: Store, folder: str, of: GradientsOf) -> None:
    """Raise GradientsRefused unless gradients of just that are wanted in a folder."""
    try:
        body = documents.read(store, f"{folder}/{TICKET}", TICKET_FORMAT)
    except ObjectMissing:
        raise GradientsRefused(
            f"The gradients of step {of.step}, optimizer step {of.optimizer_step} of run {of.run} "
            "are summed already; this one comes too late."
        ) from None
    ticket = documents.validated(GradientsOf, f"{folder}/{TICKET}", body)
    if (difference := ticket.difference(of)) is not None:
        raise GradientsRefused(f"A gradient for {folder} is refused: {difference}.")


def read_gradient(run: RunStore, folder: str, unit: int) -> Gradient | None:
    """The marker of a unit; None where it has none. Raises ObjectDamaged."""
    key = unit_key(folder, unit)
    record = run.finished(key)
    return None if record is None else documents.validated(Gradient, key, record)


def discard_gradient(run: RunStore, folder: str, unit: int) -> None:
    """Remove a unit's marker and then whatever files were written for it."""
    key = unit_key(folder, unit)
    stem = key.removesuffix(DATA_SUFFIX)
    files = [file for file in run.store.list(folder) if file.startswith(f"{stem}-")]
    run.discard({key: files})


def remove_gradients(run: RunStore, committed: int) -> list[str]:
    """Remove what is left of steps up to a committed one; returns the keys."""
    folder = f"{run.run}/gradients"
    steps = [name for name in run.store.children(folder) if name.isascii() and name.isdigit()]
    keys: list[str] = []
    for name in steps:
        if int(name) <= committed:
            keys += run.store.list(f"{folder}/{name}")
    return remove_keys(run.store, keys)


def remove_keys(store: Store, keys: list[str]) -> list[str]:
    """Delete keys, tickets and markers first: without them nobody writes or reads the rest."""
    first = [key for key in keys if key.endswith(".json")]
    rest = [key for key in keys if not key.endswith(".json")]
    store.delete(first)
    store.delete(rest)
    return first + rest
