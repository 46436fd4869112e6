"""A policy version as a folder of its own, for other software."""

from __future__ import annotations

from pathlib import Path

from configs.overrides import ConfigError
from configs.terminal_text import bytes_text
from engines.models.adapters import export_adapter, stream_whole
from storage.objects.store import Store
from storage.runs.commit_log import head, version_weights
from storage.runs.run_store import RunStore, numbered, start_of
from storage.runs.weights import MANIFEST, WeightsRef
from storage.runs.weights_writing import copy_whole
from tasks.commands.command import Answer, Request, text


def answer(request: Request) -> Answer:
    """Write the version that was named. Raises ConfigError where it or the folder will not do."""
    run, folder = request.files, Path(request.arguments.to).expanduser().absolute()
    first, last = start_of(run), head(run)
    if last is None:
        raise ConfigError(f"Run {run.run} has no committed step, so no policy version.")
    version = last if request.arguments.version is None else request.arguments.version
    if not first <= version <= last:
        raise ConfigError(f"Run {run.run} has no policy version {version}. {numbered(first, last)}")
    if folder.exists():
        raise ConfigError(f"--to: {folder} is there already. Name a folder that is not.")
    weights = version_weights(run, version)
    if not run.store.exists(f"{weights.key}/{MANIFEST}"):
        raise ConfigError(
            f"The weights of version {version} of run {run.run} are no longer in the store: "
            "retention removed them. Name a later version; store.keep_versions says how many stay."
        )
    if request.arguments.adapter:
        return _adapter(run, weights, folder)
    tensors, target = stream_whole(run.store, weights), Store(f"file://{folder.parent}")
    copy = copy_whole(run.store, weights, target, folder.name, tensors)
    return Answer(
        record={
            "run": run.run,
            "version": version,
            "digest": copy.digest,
            "bytes": copy.stored,
            "folder": str(folder),
        },
        shown=[
            text(f"Version {version} of {run.run}, {copy.digest}"),
            text(f"  {folder}  {bytes_text(copy.stored or 0)}"),
        ],
    )


def _adapter(run: RunStore, weights: WeightsRef, folder: Path) -> Answer:
    """The adapter alone, for PEFT, and where its base is."""
    export_adapter(run.store, weights, folder)
    assert weights.base is not None
    base, size = run.store.url(weights.base.key), sum(f.stat().st_size for f in folder.iterdir())
    return Answer(
        record={
            "run": run.run,
            "version": weights.version,
            "digest": weights.digest,
            "bytes": size,
            "folder": str(folder),
            "base": base,
        },
        shown=[
            text(f"Adapter of version {weights.version} of {run.run}, {weights.digest}"),
            text(f"  {folder}  {bytes_text(size)}"),
            text(f"  on the base {base}"),
        ],
    )
