"""Where MLflow finds the files of a registered version (docs/decisions/registered-versions.md).

A policy version as a model folder of MLflow's: its files, and what MLflow wants beside them.

    MLmodel, requirements.txt, python_env.yaml   what loads it (flavors transformers, python_function)
    config.json, *.safetensors, …                the version, as `refrain export` writes it
    components/tokenizer/…                       its small files again, where MLflow looks for them

MLflow is imported only where it is asked. The process that writes MLflow's pages has a run's page as
a Page (mlflow_process.py); artifact_repository.py makes a folder when MLflow asks for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote, urlsplit

import yaml

from configs.environment import installed
from engines.models.adapters import stream_whole
from storage.objects.documents import JsonValue
from storage.objects.errors import ObjectMissing, StoreError
from storage.objects.store import Store
from storage.runs.weights import (
    COMPONENTS,
    ENVIRONMENT,
    FILE_NAMES,
    MANIFEST,
    MLMODEL,
    REQUIREMENTS,
    WeightsRef,
    open_chain,
    open_manifest_at,
)
from storage.runs.weights_writing import INDEX, copy_whole
from storage.tracking.connection import TrackingError
from storage.tracking.tracker import Tracker

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel


SCHEME = "refrain-"  # before the address of a version that artifact_repository.py reads for MLflow
TOKENIZER = f"{COMPONENTS}/tokenizer"  # folder; MLflow looks nowhere else
# What loads one, in the versions of the process that describes it.
PACKAGES = ("mlflow", "transformers", "torch", "accelerate")
TASK, PIPELINE = "text-generation", "TextGenerationPipeline"
TEXT = json.dumps([{"type": "string", "required": True}])  # a column of MLflow's signatures


def version_at(
    uri: str, options: Mapping[str, JsonValue] | None = None
) -> tuple[Store, WeightsRef]:
    """A version by the address of its folder, STORE/RUN/weights/vNNNNNN.

    options: of the store's file system (store.options). Raises ObjectMissing where it is not, or no
    longer, in the store.
    """
    store_uri, run, weights, folder = uri.rstrip("/").rsplit("/", 3)
    store, key = Store(store_uri, options), f"{run}/{weights}/{folder}"
    manifest = open_manifest_at(store, key)
    return store, WeightsRef(
        version=manifest.version,
        key=key,
        digest=manifest.digest,
        nbytes=manifest.nbytes,
        base=manifest.base,
    )


def loads_as_it_lies(store: Store, ref: WeightsRef) -> bool:
    """Whether transformers reads the version's own folder: it is whole, under its model's names."""
    manifest = open_manifest_at(store, ref.key)
    return manifest.base is None and FILE_NAMES not in manifest.files


def small_files(store: Store, ref: WeightsRef) -> dict[str, bytes]:
    """What lies beside the tensors, by name: config.json and the tokenizer's files."""
    folder, manifest = open_chain(store, ref)[-1]  # a difference and an adapter have their base's
    others = [name for name in manifest.files if not name.endswith(".safetensors")]
    return {
        name: store.read(f"{folder}/{name}")
        for name in others
        if name not in (INDEX, FILE_NAMES, MANIFEST)
    }


def described(
    store: Store, ref: WeightsRef, names: Mapping[str, str | None] | None = None
) -> dict[str, bytes]:
    """The files by which MLflow loads a version, by path in its model folder; no weights.

    names: what MLmodel says of where it belongs: run_id, model_id.
    """
    small = small_files(store, ref)
    config: dict[str, JsonValue] = json.loads(small["config.json"])
    architectures = cast("list[str]", config.get("architectures") or ["AutoModelForCausalLM"])
    dtype = config.get("dtype") or config.get("torch_dtype")
    python = ".".join(map(str, sys.version_info[:3]))
    flavors = {
        "transformers": {
            "task": TASK,
            "instance_type": PIPELINE,
            "framework": "pt",
            "torch_dtype": f"torch.{dtype}" if dtype else None,
            "pipeline_model_type": architectures[0],
            "source_model_name": str(config.get("_name_or_path") or config.get("model_type")),
            "model_binary": ".",
            "components": ["tokenizer"],
            "tokenizer_type": "AutoTokenizer",
            "transformers_version": installed("transformers"),
            "code": None,
        },
        "python_function": {
            "loader_module": "mlflow.transformers",
            "python_version": python,
            "env": {"virtualenv": ENVIRONMENT},
        },
    }
    model = {
        **(names or {}),
        "artifact_path": "model",
        "flavors": flavors,
        "signature": {"inputs": TEXT, "outputs": TEXT, "params": None},
        "mlflow_version": installed("mlflow") or installed("mlflow-skinny"),
        "model_size_bytes": ref.nbytes,
        "metadata": {"refrain.version": ref.version, "refrain.digest": ref.digest},
        "utc_time_created": time.strftime("%Y-%m-%d %H:%M:%S.000000", time.gmtime()),
    }
    versions = {name: installed(name) for name in PACKAGES}
    needed = [f"{name}=={number.partition('+')[0]}" for name, number in versions.items() if number]
    environment = {"python": python, "dependencies": [f"-r {REQUIREMENTS}"]}
    return {
        MLMODEL: yaml.safe_dump(model, sort_keys=False).encode(),
        REQUIREMENTS: "\n".join([*needed, ""]).encode(),
        ENVIRONMENT: yaml.safe_dump(environment, sort_keys=False).encode(),
        **{f"{TOKENIZER}/{name}": data for name, data in small.items()},
    }


def write_links(
    store: Store, ref: WeightsRef, folder: Path, names: Mapping[str, str | None] | None = None
) -> None:
    """A model folder whose weights are links to those in a store on this machine's disk.

    Of a version that loads as it lies. Done again it is the same.
    """
    here = Path(store.url(ref.key).removeprefix("file://"))
    for name in open_manifest_at(store, ref.key).files:
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(here / name)
    write_files(described(store, ref, names), folder)


def write_whole(
    store: Store, ref: WeightsRef, folder: Path, names: Mapping[str, str | None] | None = None
) -> None:
    """A model folder with the weights themselves, each tensor checked: merged where they are an
    adapter's, experts apart. Raises ObjectMissing, ObjectDamaged naming the tensor."""
    target = Store(f"file://{folder.parent}")
    copy_whole(store, ref, target, folder.name, stream_whole(store, ref))
    write_files(described(store, ref, names), folder)


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Files by their path in a folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def on_this_disk(store: Store) -> bool:
    """Whether a store is a folder that processes of this machine reach."""
    return store.uri.startswith("file://")


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
        if any(file.path == MLMODEL for file in there.list_artifacts()):
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
