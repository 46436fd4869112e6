"""Weights of a model that no run trains, as a stored version: rollout engines take no others.

They are published once for each run, under a name that their files' digest is part of.
"""

from __future__ import annotations

from pathlib import Path

from engines.models import checkpoints
from engines.models.checkpoints import Dtype
from engines.models.tensor_files import checkpoint_names
from engines.start_progress import report
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, find_manifest
from storage.runs.weights_writing import publish, same


def published(
    store: Store, run: str, folder: str, directory: Path, files: str, dtype: Dtype, what: str
) -> WeightsRef:
    """The version of the model in `directory`, published now unless it is there.

    Args:
        folder: Below the run's, where such versions are.
        files: Digest of the weight files, by which it is found again.
        what: It is, for a person who waits.
    """
    key = f"{run}/{folder}/{files.rpartition(':')[2]}-{dtype}"
    existing = find_manifest(store, key)
    if existing is not None:
        return same(existing, key, existing.digest)
    report(f"reading {what}")
    model = checkpoints.load_for_training(directory, dtype)
    companions = checkpoints.companion_files(directory)
    tensors = checkpoint_names(directory).to_files(model.state_dict())
    return publish(store, run, 0, tensors.items(), companions, key=key)
