"""What the flow process asks of the engine that keeps what became of rows. Free of torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from configs.data import QuarantineConfig
from engines.workers.engine import Engine
from storage.batches.refs import BatchRef


@dataclass(frozen=True, kw_only=True, slots=True)
class RowHistoryRequest:
    """What became of each row of the data before a step, and what the step adds to it."""

    before: BatchRef | None  # storage.rows.row_history.RowHistory; None: nothing yet
    prompts: BatchRef  # of the step: group_id, prompt_row
    samples: BatchRef  # theirs, scored, [N]
    step: int
    quarantine: QuarantineConfig | None
    readmitted: list[int] | None  # rows that are let in again; None: all


@dataclass(frozen=True, kw_only=True, slots=True)
class RowHistoryResult:
    """What became of each row of the data in the draws so far."""

    ref: BatchRef  # storage.rows.row_history.RowHistory
    quarantined: dict[str, int]  # rows in quarantine, by reason
    entered: int  # those that the step put there


class RowHistorian(Engine):
    """Keeps what became of each row of the data in the draws so far."""

    @abstractmethod
    def row_history(self, request: RowHistoryRequest, out_key: str) -> RowHistoryResult:
        """Write what became of each row of the data, after one more step."""
