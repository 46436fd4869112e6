"""The draw task: the next prompts of the dataset, in tokens, as the step's first batch."""

from __future__ import annotations

from prefect import task

from storage.batches.refs import BatchRef
from storage.objects.digests import key_of
from storage.prompts.cursor import Exhausted
from storage.prompts.cursor import draw as draw_rows
from tasks.results import Prompts
from tasks.run.retries import OPTIONS, attempted
from tasks.run.run import Run


@task(name="draw", task_run_name="draw", **OPTIONS)
def draw(run: Run, step: int) -> Prompts:
    """Draw `prompts_per_step` rows; one whose prompt is too long is dropped, counted, replaced.

    At the end of the last epoch fewer may be left. By data.last_step they are the step's, or else
    Exhausted is raised, and what was drawn here does not count as drawn.

    Groups are numbered through the run, and through the run that it was forked from.
    """
    config = run.config
    group = first = run.first_group(step)
    last = group + config.prompts_per_step
    cursor, drawn = run.drawn[step], 0
    parts: list[BatchRef] = []
    dropped: dict[str, list[int]] = {}
    made_by = config.data.model_dump(mode="json", exclude={"last_step"})
    while group < last and cursor.remaining(config.data.epochs) != 0:
        rows, cursor = draw_rows(run.source, cursor, last - group, config.data.epochs, run.fresh)
        key = key_of("prompts", run.source.digest, rows, group, made_by)
        with attempted(run, step, "prompts") as attempt:
            made = run.engines.scorers.call(
                "prompts",
                run.call_id(step, f"prompts-{key}"),
                attempt.assignment,
                rows=rows,
                first_group=group,
                out_key=run.files.stage_key(step, "prompts", len(parts) + 1, key),
            )
        drawn += len(rows)
        for row, reason in made.dropped:
            dropped.setdefault(reason, []).append(row)
        if made.ref is not None:
            parts.append(made.ref)
            group += len(made.ref)
    if group - first < config.fewest_prompts:
        raise Exhausted(
            f"data.epochs = {config.data.epochs} left {group - first} prompts for step {step} that "
            f"fit data.max_prompt_tokens, and a step takes {config.fewest_prompts}."
        )
    run.has_drawn(step, cursor)
    return Prompts(ref=BatchRef.concat(parts), cursor=cursor, drawn=drawn, dropped=dropped)
