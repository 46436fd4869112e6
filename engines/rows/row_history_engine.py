"""What became of the rows of the data, brought up to date from a step's samples, on a cpu worker."""

from __future__ import annotations

from engines.rows.contract import RowHistorian, RowHistoryRequest, RowHistoryResult
from engines.rows.row_outcomes import row_outcomes
from engines.workers.engine import StoreSpec
from storage.batches.writing import write_batch
from storage.rows.row_history import RowHistory, updated


class RowHistoryEngine(RowHistorian):
    """Reads and writes batches alone."""

    def __init__(self, spec: StoreSpec) -> None:
        self._store = spec.open_store()

    def row_history(self, request: RowHistoryRequest, out_key: str) -> RowHistoryResult:
        """Write what became of each row of the data, after one more step."""
        old = RowHistory.read(self._store, request.before)
        outcomes = row_outcomes(self._store, request.prompts, request.samples)
        new = updated(old, outcomes, request.step, request.quarantine, request.readmitted)
        return RowHistoryResult(
            ref=write_batch(self._store, out_key, new.columns()),
            quarantined=new.counts(),
            entered=int((new.since == request.step).sum()),
        )
