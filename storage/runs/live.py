"""Which flow works on a run (live.json), on what (progress.json), and whether all is done (end.json).

live.json tells commands in another terminal which flow works on the run. It may be of a flow that
has ended; who writes the run now is in storage/runs/run_lease.py.

end.json says that nothing is left to do: after the last commit the policy is tested and promoted,
and MLflow is told the end. A run that dies in between is not done, though all its steps are there.
Nor is anything left of one that a guard took back to an earlier step: another run goes on with it.

progress.json is for who looks on from elsewhere: written over and over while a flow works on the run,
and removed when it leaves. It is no part of the run: nothing is made of it, and what a flow that died
has left says nothing of the one after it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from pydantic import Field

from configs.data import DataConfig
from storage.objects import documents
from storage.objects.documents import StoredRecord
from storage.runs.run_store import RunStore

LIVE = "refrain.live/1"  # formats
END = "refrain.end/1"
PROGRESS = "refrain.progress/1"
PROGRESS_NAME = "progress.json"


class Live(StoredRecord):
    """A flow that works on the run, or did."""

    scheduler: str  # address of its Dask scheduler
    prefect: str | None  # URL of its Prefect API
    flow_run: str | None  # id of its flow run there
    epoch: int  # of its lease
    # Paths of the PEM files ca, cert and key by which its scheduler can be asked; None: no TLS, or
    # the files that the settings name.
    certificates: dict[str, str] | None = None
    host: str | None = None  # name of the machine that the flow is on; None of an older Refrain's
    logs: str | None = None  # folder there of the flow's log and of workers on that machine
    worker_logs: str | None = None  # folder of workers' own log files, where they have such
    ended: bool = False  # the flow has ended its workers in order; it may still be at work itself


class DataOver(StoredRecord):
    """Settings under which the data give no further step."""

    epochs: int | None
    last_step: str

    @classmethod
    def of(cls, config: DataConfig) -> Self:
        """Those of a run."""
        return cls(epochs=config.epochs, last_step=config.last_step)


class RolledBack(StoredRecord):
    """How a branch of a run ended that a guard took back to an earlier step."""

    to: int  # step from which it goes on
    child: str  # the run that does
    guard: str  # its name
    why: str  # as a sentence


class End(StoredRecord):
    """The end of a run, until it is given more steps or more data."""

    step: int  # its last
    data_over: DataOver | None = None  # the data gave no further step
    rolled_back: RolledBack | None = None  # another run goes on with it; both None: no step is left
    # The metrics cost/… of what followed the last commit, such as its evaluation; {} of an older
    # Refrain's.
    cost: dict[str, float | None] = Field(default_factory=dict)


def write_live(run: RunStore, live: Live) -> None:
    """Put the record in place of an earlier one."""
    documents.write_record(run.store, f"{run.run}/live.json", LIVE, live)


def read_live(run: RunStore) -> Live | None:
    """The record of the last flow that began; None before there was one. Raises ObjectDamaged."""
    return documents.read_record(Live, run.store, f"{run.run}/live.json", LIVE)


def workers_ended(run: RunStore) -> None:
    """Put on record that the flow which is named there ends its workers. Only under the lease."""
    live = read_live(run)
    if live is not None:
        write_live(run, live.model_copy(update={"ended": True}))


def write_end(run: RunStore, end: End) -> None:
    """Put on record that nothing is left to do after a step. Only under the run's lease."""
    documents.write_record(run.store, f"{run.run}/end.json", END, end)


def read_end(run: RunStore) -> End | None:
    """The record of the last end; None before there was one. Raises ObjectDamaged."""
    return documents.read_record(End, run.store, f"{run.run}/end.json", END)


def goes_on_as(run: RunStore) -> RunStore:
    """The run that goes on with one that a guard rolled back, perhaps more than once; or itself."""
    end = read_end(run)
    if end is None or end.rolled_back is None:
        return run
    return goes_on_as(replace(run, run=end.rolled_back.child))


def is_done(run: RunStore, step: int) -> bool:
    """Whether nothing is left to do after a step; False where the run went on from an earlier end."""
    end = read_end(run)
    return end is not None and end.step == step


def state_of(running: bool, finished: bool, back: RolledBack | None) -> str:
    """What a run is doing, in a word or a clause."""
    if back is not None:
        return f"rolled back to step {back.to} by {back.guard}, continued as {back.child}"
    return "running" if running else "finished" if finished else "stopped"


class Phase(StoredRecord):
    """Something that is under way, such as a part of a step."""

    name: str  # for people, such as "sampling"
    done: int | None = None  # of `total`; None: not counted
    total: int | None = None
    unit: str = ""  # of both, such as "shards"
    note: str = ""  # what else there is to say, such as "340 tokens/s"
    seconds: float = 0.0  # for which it has gone on


class Progress(StoredRecord):
    """Where a run stands between two commits."""

    epoch: int  # of the lease of the flow that says so
    step: int = 0  # that began last; 0: none yet
    steps: int = 0  # that the run is asked for; 0: not known
    doing: Phase | None = None  # what goes on where no phase does, such as the start of engines
    phases: tuple[Phase, ...] = ()  # in the order in which they began
    seconds_left: float | None = None  # until the last step, by the last ones; None: not known yet


def write_progress(run: RunStore, progress: Progress) -> None:
    """Put it in place of an earlier one. Only under the run's lease."""
    documents.write_record(run.store, f"{run.run}/{PROGRESS_NAME}", PROGRESS, progress)


def read_progress(run: RunStore) -> Progress | None:
    """What is going on; None where no flow works on the run. Raises ObjectDamaged."""
    return documents.read_record(Progress, run.store, f"{run.run}/{PROGRESS_NAME}", PROGRESS)


def remove_progress(run: RunStore) -> None:
    """Say nothing any more. Only under the run's lease."""
    run.store.delete([f"{run.run}/{PROGRESS_NAME}"])
