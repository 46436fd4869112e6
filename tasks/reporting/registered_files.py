"""Where MLflow finds the files of a registered version (docs/decisions/registered-versions.md).

The process that writes MLflow's pages has a run's page as a Page (mlflow_process.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from storage.objects.errors import ObjectMissing, StoreError
from storage.objects.store import Store
from storage.runs.weights import WeightsRef
from storage.tracking.connection import TrackingError
from storage.tracking.tracker import Tracker
from tasks.reporting.model_folder import (
    MLMODEL,
    SCHEME,
    described,
    loads_as_it_lies,
    on_this_disk,
    version_at,
    write_files,
    write_links,
    write_whole,
)

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

OBJECT_STORES = ("s3://", "gs://")  # that MLflow reads by itself, with the client's own credentials


class Page(Tracker):
    """A run's page whose registered versions MLflow can load."""

    def place_files(self, model: LoggedModel, uri: str) -> str:
        """As Tracker.place_files; raises TrackingError where the version is no longer in the store.

        Done again it is the same.
        """
        try:
            store, ref = version_at(uri, self.tracked.store_options)
            return self._placed(model, uri, store, ref)
        except ObjectMissing:
            raise TrackingError(
                f"The version at {uri} is not registered: its files are no longer in the store."
            ) from None
        except StoreError as error:
            raise TrackingError(f"The version at {uri} is not registered: {error}") from error

    def _placed(self, model: LoggedModel, uri: str, store: Store, ref: WeightsRef) -> str:
        names = {"run_id": self.run_id, "model_id": model.model_id}
        location, plain = str(model.artifact_location), loads_as_it_lies(store, ref)
        if self.config.copy_models:
            self._copy(model, store, ref, names)
            return location
        if plain and on_this_disk(store) and (folder := _local(location)) is not None:
            write_links(store, ref, folder, names)
            return location
        files = described(store, ref, names)
        with tempfile.TemporaryDirectory() as scratch:
            write_files({MLMODEL: files[MLMODEL]}, Path(scratch))  # MLflow's pages read it there
            self.client.log_model_artifacts(model.model_id, scratch)
        if plain and store.uri.startswith(OBJECT_STORES):
            for name, data in files.items():
                store.write(f"{ref.key}/{name}", data)
            return uri
        return f"{SCHEME}{uri}"

    def _copy(
        self, model: LoggedModel, store: Store, ref: WeightsRef, names: Mapping[str, str | None]
    ) -> None:
        """Copy the whole folder to MLflow's artifacts; its MLmodel, which comes last, says all is
        there."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        there = get_artifact_repository(model.artifact_location, tracking_uri=self.config.uri)
        if any(one.path == MLMODEL for one in there.list_artifacts()):
            return
        with tempfile.TemporaryDirectory() as scratch:
            folder, last = Path(scratch, "model"), Path(scratch, "last")
            if on_this_disk(store) and loads_as_it_lies(store, ref):
                write_links(store, ref, folder, names)
            else:
                write_whole(store, ref, folder, names)
            last.mkdir()
            (folder / MLMODEL).rename(last / MLMODEL)
            for part in (folder, last):
                self.client.log_model_artifacts(model.model_id, str(part))


def _local(location: str) -> Path | None:
    """The folder that an artifact location is, if it is one of this machine's."""
    parts = urlsplit(location)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None
