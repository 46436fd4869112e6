"""The tokens of a shard in progress, saved so that another worker can go on from them.

A save is a batch of its own, as `write_samples` writes it, and a marker beside it that names the
newest one. Nothing refers to them once the shard is done: then both go.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import cast

from engines.failures import InfrastructureError
from storage.batches.refs import BatchRef
from storage.objects import documents
from storage.objects.errors import ObjectMissing, StoreError
from storage.objects.store import Store

FORMAT = "refrain.partial/1"
SUFFIX = ".safetensors"

log = logging.getLogger(__name__)


class PartialSamples:
    """What is saved of one shard."""

    def __init__(self, store: Store, out_key: str) -> None:
        self._store = store
        base = out_key.removesuffix(SUFFIX)
        self._marker = f"{base}-partial.json"
        self.key = f"{base}-partial{SUFFIX}"  # of a save; the store gives each a name of its own

    def read(self) -> BatchRef | None:
        """The newest save; None where there is none."""
        try:
            body = documents.read(self._store, self._marker, FORMAT)
        except ObjectMissing:
            return None
        return BatchRef.from_json(body["ref"])

    def take(self) -> BatchRef | None:
        """The newest save, which stays for whoever refers to it from now on; the marker goes."""
        samples = self.read()
        if samples is not None:
            self._store.delete([self._marker])
        return samples

    def write(self, ref: BatchRef, written: str) -> None:
        """Make a batch the newest save, whose own object is `written`; the one before goes."""
        before = self._written()
        body = {"ref": ref.to_json(), "written": written}
        self._store.write(self._marker, documents.encode(FORMAT, body))
        self._store.delete([key for key in before if key != written])

    def remove(self) -> None:
        """The shard is done, or will not be: the marker goes, then the save."""
        keys = self._written()
        if keys:
            self._store.delete([self._marker])
            self._store.delete(keys)

    def _written(self) -> list[str]:
        try:
            body = documents.read(self._store, self._marker, FORMAT)
        except ObjectMissing:
            return []
        return [cast("str", body["written"])]


@contextlib.contextmanager
def saving(every: float | None, save: Callable[[], None]) -> Iterator[None]:
    """During the body, save every so many seconds.

    A store that is away is tried again later; an engine that has died ends the body itself.
    """
    if every is None:
        yield
        return
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(every):
            try:
                save()
            except (StoreError, InfrastructureError) as error:
                log.warning("The tokens so far could not be saved, the next save comes: %s", error)

    thread = threading.Thread(target=keep, name="save-tokens", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
