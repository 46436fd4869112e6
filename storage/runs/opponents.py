"""The frozen policy version that plays against a run's own (episodes.opponent), and what keeps it.

A version of another run is in run.json, so that a run that goes on has the same one, whatever an
alias names by then; the other run's retention keeps it for as long as this run exists. Without it the
opponent is the version that the run began with.
"""

from __future__ import annotations

from storage.objects.documents import StoredRecord
from storage.objects.errors import ObjectDamaged
from storage.runs.commit_log import version_weights
from storage.runs.retention import pin_version
from storage.runs.run_store import RunStore, start_of
from storage.runs.weights import WeightsRef

FIELD = "opponent"  # of run.json


class Opponent(StoredRecord):
    """A policy version of another run of the same store."""

    run: str  # in whose folder it lies
    weights: WeightsRef

    @classmethod
    def of(cls, weights: WeightsRef) -> Opponent:
        """The version by its weights."""
        return cls(run=weights.key.partition("/")[0], weights=weights)

    def __str__(self) -> str:
        return f"{self.run}@{self.weights.version}"


def recorded_opponent(run: RunStore) -> Opponent | None:
    """The version of another run that plays against this one; None: its own first one, or none.

    Raises ObjectDamaged.
    """
    record = (run.read_run() or {}).get(FIELD)
    if record is None:
        return None
    try:
        return Opponent.model_validate(record)
    except ValueError as error:
        raise ObjectDamaged(
            f"Object {run.run_json_key} names no valid opponent: {error}"
        ) from error


def opponent_of(run: RunStore) -> Opponent:
    """The opponent of a run that has one, and has committed a step."""
    return recorded_opponent(run) or Opponent.of(version_weights(run, start_of(run)))


def keep(child: RunStore, opponent: Opponent) -> None:
    """Have the other run's retention keep the version for as long as `child` exists."""
    owner = RunStore(child.store, opponent.run)
    pin_version(child, owner, opponent.weights.version, FIELD)
