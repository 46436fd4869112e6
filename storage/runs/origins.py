"""Where a run begins, if not with its model's own weights: at a committed step of another run.

A run keeps its origin in run.json. Nothing is copied: the child's first commit names the parent's
weights, its trainer loads the parent's snapshot, and steps up to the origin are read from the
parent. How an origin is made, and what the parent keeps for it, is in forks.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from pydantic import BaseModel, ConfigDict, Field

from storage.objects import documents
from storage.objects.errors import ObjectDamaged
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FIELD = "origin"  # of run.json


class RollbackCause(BaseModel):
    """Why a run began: a guard took another one back to an earlier step."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run: str  # that went back; the origin's, or one that had begun there
    after: int  # its step after which the guard decided so
    guard: str  # its name
    why: str  # as a sentence
    number: int = Field(ge=1)  # of rollbacks in a row, this one included
    change: list[str] = Field(default_factory=list)  # settings that changed, as key=value


class Origin(BaseModel):
    """A place in another run of the same store, and what is taken over from it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # the parent
    step: int  # its committed step with whose result the child begins
    at: int  # what the child counts that as: its own first step is at + 1
    commit_digest: str  # of the parent's commit.json of the step
    weights: WeightsRef  # the policy version that the step made
    trainer_state: bool  # optimizer and schedule go on too, not the weights alone
    cursor: bool  # the data go on where the step's draw ended, not from their beginning
    first_group: int = 0  # number of the first group of prompts that the child draws
    rollback: RollbackCause | None = None  # None: a person began the child

    @property
    def fork(self) -> bool:
        """Whether steps are counted on from the parent's: its history is the child's past."""
        return self.at == self.step

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


def origin_of(run: RunStore) -> Origin | None:
    """The run's origin; None when it began with its model's own weights. Raises ObjectDamaged."""
    record = run.constant(FIELD)
    if record is None:
        return None
    return documents.validated(Origin, run.run_json_key, cast("Mapping[str, object]", record))


def start_of(run: RunStore) -> int:
    """The version that the run begins with; its first own step is the next number."""
    origin = origin_of(run)
    return 0 if origin is None else origin.at


def numbered(first: int, last: int) -> str:
    """Which steps or versions there are to name, as a sentence."""
    if last < first:
        return "There is none yet."
    return f"Name {first}, the only one." if first == last else f"Name one from {first} to {last}."


def parent_of(run: RunStore, origin: Origin) -> RunStore:
    """The run that an origin names."""
    return replace(run, run=origin.run)


def ancestry(run: RunStore) -> Iterator[tuple[RunStore, Origin | None]]:
    """The run, its parent, and so on, each with its own origin."""
    current: RunStore | None = run
    seen: set[str] = set()
    while current is not None:
        if current.run in seen:
            raise ObjectDamaged(f"Object {run.run_json_key} is, by way of others, its own origin.")
        seen.add(current.run)
        origin = origin_of(current)
        yield current, origin
        current = None if origin is None else parent_of(current, origin)


def committer(run: RunStore, step: int) -> tuple[RunStore, int]:
    """The run in which a step of `run`'s past was committed, and its number there.

    A step after the origin is the run's own. Raises ValueError for one before every beginning.
    """
    for current, origin in ancestry(run):
        start = 0 if origin is None else origin.at
        if step > start:
            return current, step
        if origin is None:
            break
        step += origin.step - origin.at
    raise ValueError(f"Run {run.run} has no step {step}.")
