"""What a run is doing now, for who looks on from elsewhere (progress.json).

Written over and over while a flow works on the run, and removed when it leaves. It is no part of the
run: nothing is made of it, and what a flow that died has left says nothing of the one after it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from storage.objects import documents
from storage.objects.errors import ObjectMissing
from storage.runs.run_store import RunStore

FORMAT = "refrain.progress/1"
NAME = "progress.json"


class Phase(BaseModel):
    """Something that is under way, such as a part of a step."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str  # for people, such as "sampling"
    done: int | None = None  # of `total`; None: not counted
    total: int | None = None
    unit: str = ""  # of both, such as "shards"
    note: str = ""  # what else there is to say, such as "340 tokens/s"
    seconds: float = 0.0  # for which it has gone on


class Progress(BaseModel):
    """Where a run stands between two commits."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    epoch: int  # of the lease of the flow that says so
    step: int = 0  # that began last; 0: none yet
    steps: int = 0  # that the run is asked for; 0: not known
    doing: Phase | None = None  # what goes on where no phase does, such as the start of engines
    phases: tuple[Phase, ...] = ()  # in the order in which they began
    seconds_left: float | None = None  # until the last step, by the last ones; None: not known yet


def write_progress(run: RunStore, progress: Progress) -> None:
    """Put it in place of what was said before. Only under the run's lease."""
    run.store.write(_key(run), documents.encode(FORMAT, progress.model_dump(mode="json")))


def read_progress(run: RunStore) -> Progress | None:
    """What was said last; None where no flow says anything. Raises ObjectDamaged."""
    try:
        body = documents.read(run.store, _key(run), FORMAT)
    except ObjectMissing:
        return None
    return documents.validated(Progress, _key(run), body)


def remove_progress(run: RunStore) -> None:
    """Say nothing any more. Only under the run's lease."""
    run.store.delete([_key(run)])


def _key(run: RunStore) -> str:
    return f"{run.run}/{NAME}"
