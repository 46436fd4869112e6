"""What quarantine, and an order by difficulty, add to a run."""

from tasks.quarantine.committing import to_commit
from tasks.quarantine.roles import ROW_HISTORIES
from tasks.quarantine.row_histories import RowHistories
from tasks.run.features import Feature

FEATURE = Feature(roles=(ROW_HISTORIES,), rows=RowHistories, commit=to_commit)
