"""What a commit has of the rows of the data: their table after the step, and who is in quarantine."""

from __future__ import annotations

from engines.rows.contract import RowHistorian, RowHistoryRequest, RowHistoryResult
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from tasks.quarantine.roles import ROW_HISTORIES
from tasks.quarantine.row_histories import RowHistories
from tasks.results import Metrics, Prompts
from tasks.run.contract import StepView
from tasks.run.features import ToCommit
from tasks.run.stage import Part, spread


def to_commit(run: StepView, step: int, prompts: Prompts, samples: BatchRef) -> ToCommit:
    """Refs of the tables that later draws need; metrics where rows can leave the draw."""
    histories = run.clock.rows
    assert isinstance(histories, RowHistories), "the feature's record makes them"
    rows = row_history(run, histories, step, prompts, samples)
    leave = run.config.data.quarantine is not None
    return ToCommit(
        refs=histories.named(step, rows.ref),
        metrics=quarantine_metrics(prompts, rows) if leave else {},
    )


def row_history(
    run: StepView, histories: RowHistories, step: int, prompts: Prompts, samples: BatchRef
) -> RowHistoryResult:
    """What became of each row of the data, this step included."""
    before, quarantine = histories.before(step), run.config.data.quarantine
    again = histories.readmitted(step, prompts.readmissions)
    bounds = None if quarantine is None else quarantine.model_dump(mode="json")
    listed = None if again is None else sorted(again)
    known = None if before is None else before.to_json()
    key = key_of("row_history", known, samples.to_json(), bounds, listed)
    request = RowHistoryRequest(
        before=before,
        prompts=prompts.ref[["group_id", "prompt_row"]],
        samples=samples,
        step=step,
        quarantine=quarantine,
        readmitted=listed,
    )
    out_key = run.files.stage_key(step, "row_history", 1, key)
    part = Part.of(
        run.engines[ROW_HISTORIES], RowHistorian.row_history, request=request, out_key=out_key
    )
    (found,) = spread(run, step, "row_history", [part], RowHistoryResult)
    return found


def quarantine_metrics(prompts: Prompts, rows: RowHistoryResult) -> Metrics:
    """Rows in quarantine after a step, in all and by reason, and those that its draw passed over."""
    return {
        "quarantine/rows": float(sum(rows.quarantined.values())),
        "quarantine/entered": float(rows.entered),
        "quarantine/passed_over": float(prompts.passed_over),
        **{f"quarantine/{reason}": float(n) for reason, n in rows.quarantined.items()},
    }
