"""Commits: what makes a step part of a run."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, field_serializer, field_validator, model_validator

from storage.refs import BatchRef
from storage.runs import RunStore
from storage.weights import WeightsRef


class Ledger(BaseModel):
    """Prompts of the run so far."""

    drawn: int = 0
    trained: int = 0
    filtered: int = 0
    dropped: dict[str, int] = {}
    in_flight: int = 0

    @model_validator(mode="after")
    def _balances(self) -> Ledger:
        used = self.trained + self.filtered + sum(self.dropped.values()) + self.in_flight
        if used != self.drawn:
            raise ValueError(f"The ledger does not balance: {self.drawn} drawn, {used} accounted.")
        return self


class Commit(BaseModel):
    """One committed step."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    step: int
    parent: int
    refs: dict[str, BatchRef]
    version_in: WeightsRef
    version_out: WeightsRef
    cursor: dict[str, Any]
    ledger: Ledger
    metrics: dict[str, float]
    attempts: list[dict[str, Any]] = []
    algorithm: dict[str, Any] = {}

    @field_validator("refs", mode="before")
    @classmethod
    def _read_refs(cls, value: dict[str, Any]) -> dict[str, BatchRef]:
        return {
            k: v if isinstance(v, BatchRef) else BatchRef.from_json(v) for k, v in value.items()
        }

    @field_serializer("refs")
    def _write_refs(self, value: dict[str, BatchRef]) -> dict[str, Any]:
        return {k: v.to_json() for k, v in value.items()}


def commit(files: RunStore, record: Commit) -> None:
    """Write the commit, then move HEAD."""
    files.store.write(files.commit_key(record.step), record.model_dump_json().encode())
    expected = json.dumps({"step": record.parent}).encode() if record.parent else None
    files.store.replace(files.head_key, json.dumps({"step": record.step}).encode(), expected)


def head(files: RunStore) -> int | None:
    """The last committed step."""
    if not files.store.exists(files.head_key):
        return None
    return int(json.loads(files.store.read(files.head_key))["step"])


def read_commit(files: RunStore, step: int) -> Commit:
    """A committed step."""
    return Commit.model_validate_json(files.store.read(files.commit_key(step)))
