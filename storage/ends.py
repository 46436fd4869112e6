"""Whether all of a run is done: its steps, and what follows the last of them.

After the last commit the policy is tested and promoted, and MLflow is told the end. A run that dies
in between has all its steps, and is resumed for the rest.
"""

from __future__ import annotations

from storage import documents
from storage.errors import ObjectMissing
from storage.runs import RunStore

FORMAT = "refrain.end/1"


def write_end(run: RunStore, step: int) -> None:
    """Put on record that nothing is left to do after a step. Only under the run's lease."""
    run.store.write(_key(run), documents.encode(FORMAT, {"step": step}))


def is_done(run: RunStore, step: int) -> bool:
    """Whether nothing is left to do after a step; False where the run went on from an earlier end."""
    try:
        return documents.read(run.store, _key(run), FORMAT).get("step") == step
    except ObjectMissing:
        return False


def _key(run: RunStore) -> str:
    return f"{run.run}/end.json"
