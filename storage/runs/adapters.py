"""Where the whole weights lie on which a run's adapters are.

A LoRA run publishes the frozen base once, below `weights/base-<dtype>/`, which retention never
removes; every policy version, 0 included, is an adapter whose manifest names that base. A run that
goes on with its parent's trainer state shares the parent's base.
"""

from __future__ import annotations

from storage.objects.errors import ObjectMissing
from storage.runs.run_store import RunStore, origin_of, parent_of
from storage.runs.weights import BaseVersion, WeightsRef, open_manifest_at

FOLDER = "base-"  # how the name of a base's folder begins


def base_key(run: RunStore, dtype: str) -> str:
    """The folder of the run's own base in a number format."""
    return f"{run.run}/weights/{FOLDER}{dtype}"


def base_keys(run: RunStore) -> list[str]:
    """The folders of the run's own bases, finished or not."""
    names = run.store.children(f"{run.run}/weights")
    return [f"{run.run}/weights/{name}" for name in sorted(names) if name.startswith(FOLDER)]


def find_base(run: RunStore, dtype: str) -> BaseVersion | None:
    """The published base of a run's adapters in a number format, its own or shared; or None."""
    key = base_key(run, dtype)
    try:
        manifest = open_manifest_at(run.store, key)
    except ObjectMissing:
        origin = origin_of(run)
        if origin is None or not origin.trainer_state:
            return None
        return find_base(parent_of(run, origin), dtype)
    return BaseVersion(key=key, digest=manifest.digest)


def trained_base(run: RunStore) -> WeightsRef | None:
    """The version that the trainer's frozen weights are; None: the model's own.

    A run that begins with the weights of another one, and not with its trainer's state, has them
    below a new adapter.
    """
    origin = origin_of(run)
    if origin is None:
        return None
    return trained_base(parent_of(run, origin)) if origin.trainer_state else origin.weights
