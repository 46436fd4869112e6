"""Results of stages in a store: data under a key of what they were made of, then a marker.

A run has them by step (run_store.py), an evaluation below its own key
(storage/evaluations/files.py). The marker says that a result is finished: whoever wants the same
again finds it there, after a failed attempt or a crash too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from storage.objects import documents
from storage.objects.errors import ObjectMissing
from storage.objects.store import Store

STAGE_FORMAT = "refrain.stage/1"
DATA_SUFFIX = ".safetensors"


class StageStore(ABC):
    """Where stage results lie."""

    __slots__ = ()

    store: Store

    @abstractmethod
    def step_key(self, step: int) -> str:
        """The folder of a step."""

    def stage_key(self, step: int, stage: str, shard: int | str, key: str) -> str:
        """The data of a stage's result. `key`: `digests.key_of` its inputs and parameters."""
        return f"{self.step_key(step)}/{stage}/{shard}-{key}{DATA_SUFFIX}"

    def finish(self, key: str, record: Mapping[str, object]) -> dict[str, object]:
        """Mark the stage result `key` as done, after its data: the record by which it is reused.

        As `finish_result`.
        """
        return finish_result(self.store, key, record)

    def expect(self, key: str) -> None:
        """A worker is about to make this result and to mark it as done (`finish_result`)."""
        del key  # every result is looked for here

    def discard(self, results: Mapping[str, Iterable[str]]) -> None:
        """Remove stage results that are needed no more: their markers, then their data.

        results: the key with which a result was finished -> the objects that its record names. They
        are others where a late attempt's bytes differed and so went to a key of their own.
        """
        self.store.delete([marker_key(key) for key in sorted(results)])
        self.store.delete(sorted({key for data in results.values() for key in data}))

    def finished(self, key: str) -> dict[str, object] | None:
        """The record with which the stage result `key` was finished; None when it was not."""
        try:
            return documents.read(self.store, marker_key(key), STAGE_FORMAT)
        except ObjectMissing:
            return None


def finish_result(store: Store, key: str, record: Mapping[str, object]) -> dict[str, object]:
    """Mark a stage result as done, after its data, wherever it was made.

    `key` is what `StageStore.stage_key` gave. The first record stands: the one that stands is
    returned, so a late attempt learns that another was faster and uses that one's result.
    """
    marker = marker_key(key)
    data = documents.encode(STAGE_FORMAT, record)
    if store.create(marker, data):
        return documents.decode(STAGE_FORMAT, marker, data)
    return documents.read(store, marker, STAGE_FORMAT)


def marker_key(key: str) -> str:
    """Where the marker of the stage result `key` is."""
    return key.removesuffix(DATA_SUFFIX) + ".json"
