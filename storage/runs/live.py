"""Where a run goes on now, and whether all of it is done: small records beside its commits.

live.json tells commands in another terminal which flow works on the run. It may be of a flow that
has ended; who writes the run now is in storage/runs/run_lease.py.

end.json says that nothing is left to do: after the last commit the policy is tested and promoted,
and MLflow is told the end. A run that dies in between is not done, though all its steps are there.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from storage.objects import documents
from storage.objects.errors import ObjectMissing
from storage.runs.run_store import RunStore

LIVE = "refrain.live/1"  # formats
END = "refrain.end/1"


class Live(BaseModel):
    """A flow that works on the run, or did."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    scheduler: str  # address of its Dask scheduler
    prefect: str | None  # URL of its Prefect API
    flow_run: str | None  # id of its flow run there
    epoch: int  # of its lease
    # Paths of the PEM files ca, cert and key by which its scheduler can be asked; None: no TLS, or
    # the files that the settings name.
    certificates: dict[str, str] | None = None


def write_live(run: RunStore, live: Live) -> None:
    """Put the record in place of an earlier one."""
    run.store.write(_live_key(run), documents.encode(LIVE, live.model_dump(mode="json")))


def read_live(run: RunStore) -> Live | None:
    """The record of the last flow that began; None before there was one."""
    try:
        return Live.model_validate(documents.read(run.store, _live_key(run), LIVE))
    except ObjectMissing:
        return None


def _live_key(run: RunStore) -> str:
    return f"{run.run}/live.json"


def write_end(run: RunStore, step: int) -> None:
    """Put on record that nothing is left to do after a step. Only under the run's lease."""
    run.store.write(_end_key(run), documents.encode(END, {"step": step}))


def is_done(run: RunStore, step: int) -> bool:
    """Whether nothing is left to do after a step; False where the run went on from an earlier end."""
    try:
        return documents.read(run.store, _end_key(run), END).get("step") == step
    except ObjectMissing:
        return False


def _end_key(run: RunStore) -> str:
    return f"{run.run}/end.json"
