"""Where a run goes on now: kept in its store, for commands that look at it from another terminal.

The record may be of a flow that has ended; who writes the run now is storage/leases.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from storage import documents
from storage.errors import ObjectMissing
from storage.runs import RunStore

FORMAT = "refrain.live/1"


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
    run.store.write(_key(run), documents.encode(FORMAT, live.model_dump(mode="json")))


def read_live(run: RunStore) -> Live | None:
    """The record of the last flow that began; None before there was one."""
    try:
        return Live.model_validate(documents.read(run.store, _key(run), FORMAT))
    except ObjectMissing:
        return None


def _key(run: RunStore) -> str:
    return f"{run.run}/live.json"
