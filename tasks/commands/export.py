"""A policy version as a folder of its own, for other software."""

from __future__ import annotations

from pathlib import Path

from configs.overrides import ConfigError
from storage.objects.store import Store
from storage.runs.commit_log import head, version_weights
from storage.runs.origins import start_of
from storage.runs.weights_writing import copy_whole
from tasks.commands.command import Answer, Request, bytes_text, text


def answer(request: Request) -> Answer:
    """Write the version that was named. Raises ConfigError where it or the folder will not do."""
    run, folder = request.files, Path(request.arguments.to).expanduser().absolute()
    first, last = start_of(run), head(run)
    if last is None:
        raise ConfigError(f"Run {run.run} has no committed step, so no policy version.")
    version = last if request.arguments.version is None else request.arguments.version
    if not first <= version <= last:
        raise ConfigError(
            f"Run {run.run} has no policy version {version}. Name one from {first} to {last}."
        )
    if folder.exists():
        raise ConfigError(f"--to: {folder} is there already. Name a folder that is not.")
    weights = version_weights(run, version)
    written = copy_whole(run.store, weights, Store(f"file://{folder.parent}"), folder.name)
    return Answer(
        record={
            "run": run.run,
            "version": version,
            "digest": written.digest,
            "bytes": written.stored,
            "folder": str(folder),
        },
        shown=[
            text(f"Version {version} of {run.run}, {written.digest}"),
            text(f"  {folder}  {bytes_text(written.stored or 0)}"),
        ],
    )
