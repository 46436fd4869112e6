"""What a run's policy versions call their tensors: as the model's files do, or as an older run's."""

from __future__ import annotations

from typing import Literal, get_args

from storage.runs.run_store import Origin, RunStore, parent_of

FIELD = "version_names"  # of run.json; an older Refrain's has none

VersionNames = Literal["model", "checkpoint", "files"]  # as TrainSpec has them


def version_names(files: RunStore) -> VersionNames:
    """Of a run that is on record."""
    found = files.constant(FIELD)
    return next((one for one in get_args(VersionNames) if one == found), "model")


def names_to_begin_with(files: RunStore, origin: Origin | None) -> VersionNames:
    """Of a new run: as its parent's, whose last version it has as its own first."""
    return "files" if origin is None else version_names(parent_of(files, origin))
