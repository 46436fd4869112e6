"""The draw task: the next prompts of the dataset, in tokens, as the step's first batch."""

from __future__ import annotations

from prefect import task

from engines.calls import Lease
from storage.digests import key_of
from storage.prompts import draw as draw_rows
from storage.refs import BatchRef
from tasks.results import Prompts
from tasks.retries import OPTIONS
from tasks.run import Run


@task(name="draw", **OPTIONS)
def draw(run: Run, step: int) -> Prompts:
    """Draw `prompts_per_step` rows; a row whose prompt is too long is dropped, counted, replaced."""
    config = run.config
    cursor, parts, drawn = run.cursor, [], 0
    dropped: dict[str, int] = {}
    missing = config.prompts_per_step
    while missing:
        rows, cursor = draw_rows(run.source, cursor, missing, epochs=config.data.epochs)
        first_group = (step - 1) * config.prompts_per_step + len(BatchRef.concat(parts)) if parts else (
            (step - 1) * config.prompts_per_step
        )
        key = key_of("prompts", run.source.digest, rows, first_group, config.data.model_dump())
        out_key = run.files.stage_key(step, "prompts", len(parts) + 1, key)
        made = run.scorers.call(
            "prompts",
            Lease(run=run.name, epoch=run.epoch, step=step, call=f"prompts-{len(parts)}-{key}"),
            rows=rows,
            first_group=first_group,
            out_key=out_key,
        )
        drawn += len(rows)
        for reason in made.dropped:
            dropped[reason] = dropped.get(reason, 0) + 1
        if made.ref is not None:
            parts.append(made.ref)
            missing -= len(made.ref)
    return Prompts(ref=BatchRef.concat(parts), cursor=cursor, drawn=drawn, dropped=dropped)
