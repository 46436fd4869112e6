"""The draw task: the next prompts of the dataset, in tokens, as the step's first batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from prefect import task

from configs.grpo import GRPOConfig
from engines.data.contract import PromptMaker, PromptsResult
from storage.batches.columns import TOKENS
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import key_of
from storage.prompts.cursor import Cursor, Exhausted
from storage.prompts.cursor import draw as draw_rows
from tasks.results import Carried, Prompts
from tasks.run.features import ToDraw
from tasks.run.roles import prompters
from tasks.run.run import Run
from tasks.run.stage import OPTIONS, Part, Stage, slices, spread

PART_ROWS = 256  # of the data set, whose prompts one call makes
MOST_PARTS = 64


@task(name="draw", task_run_name="draw", **OPTIONS)
def draw(run: Run, step: int) -> Prompts:
    """Draw `prompts_per_step` rows; one whose prompt is too long is dropped, counted, replaced.

    At the end of the last epoch fewer may be left. By data.last_step they are the step's, or else
    Exhausted is raised, and what was drawn here does not count as drawn.

    Groups are numbered through the run, and through the run that it was forked from.
    """
    config, cursor = run.config, run.clock.drawn[step]
    plan = next(filter(None, (feature.draw(run, step) for feature in run.features)), None)
    plan = plan or ToDraw(count=config.prompts_per_step)
    carried = plan.carried or Carried()
    before = [] if carried.prompts is None else [carried.prompts]
    groups = draw_groups(run, step, cursor, run.clock.first_group(step), plan.count, len(before))
    check_enough(config, step, groups.groups, len(carried))
    if not config.carries:  # else the next step draws when it is known what this one hands on
        run.clock.has_drawn(step, groups.cursor, Carried())
    return Prompts(
        ref=BatchRef.concat([*before, *groups.parts]),
        cursor=groups.cursor,
        drawn=groups.drawn,
        dropped=groups.dropped,
        carried=carried,
        passed_over=groups.passed_over,
        readmissions=groups.readmissions,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnPrompts:
    """Prompts that were drawn, as they were stored."""

    parts: list[BatchRef]  # perhaps none
    cursor: Cursor  # after them
    drawn: int  # rows, those dropped included
    dropped: dict[str, list[int]]  # rows, by reason
    passed_over: int  # rows in quarantine
    readmissions: int  # requests to readmit rows that were taken account of

    @property
    def groups(self) -> int:
        return sum(map(len, self.parts))


def draw_groups(
    run: Run, step: int, cursor: Cursor, first_group: int, count: int, before: int = 0
) -> DrawnPrompts:
    """Draw `count` prompts that fit, numbered from first_group; fewer where the data's epochs end.

    before: parts that the step has already, for the names of the new ones.
    """
    config, began = run.config, cursor
    known_rows = run.clock.rows.for_draw(step)
    hooks = (feature.next_rows(run, step, cursor, count) for feature in run.features)
    next_rows = next(filter(None, hooks), None)
    group, last, draws = first_group, first_group + count, 0
    parts: list[BatchRef] = []
    dropped: dict[str, list[int]] = {}
    made_by = config.data.in_keys({"last_step", "order", "quarantine"})
    while group < last and cursor.remaining(config.data.epochs) != 0:
        if next_rows is not None:
            rows, cursor = next_rows.draw(cursor, known_rows)
        else:
            rows, cursor = draw_rows(
                run.source,
                cursor,
                last - group,
                config.data.epochs,
                run.fresh,
                known_rows.kept_out,
                known_rows.ranks,
            )
        if not rows:  # all that was left is in quarantine
            continue
        key = key_of("prompts", TOKENS, run.source.digest, rows, group, made_by)
        result = tokenized(run, step, rows, group, f"{before + len(parts) + 1}", key)
        draws += len(rows)
        for row, reason in result.dropped:
            dropped.setdefault(reason, []).append(row)
        if next_rows is not None:
            next_rows.dropped([row for row, _ in result.dropped])
        if result.ref is not None:
            parts.append(result.ref)
            group += len(result.ref)
    return DrawnPrompts(
        parts=parts,
        cursor=cursor,
        drawn=draws,
        dropped=dropped,
        passed_over=cursor.place - began.place - draws,
        readmissions=known_rows.readmissions,
    )


def check_enough(config: GRPOConfig, step: int, new: int, carried: int = 0) -> None:
    """Exhausted where a step has fewer prompts than it may be made with."""
    if carried + new < config.fewest_prompts:
        raise Exhausted(
            f"data.epochs = {config.data.epochs} left {new} prompts for step {step} that "
            f"fit data.max_prompt_tokens, and a step takes {config.fewest_prompts}."
        )


def tokenized(
    run: Run, step: int, rows: list[int], first_group: int, number: str, key: str
) -> PromptsResult:
    """The prompts of rows; many are made in parts, and numbered once it is known which stay."""
    cuts = slices(len(rows), PART_ROWS, MOST_PARTS)
    if len(cuts) == 1:
        stage = Stage(run=run, step=step, name="prompts", key=key, part=number)
        return stage.call(
            prompters(run.engines),
            PromptMaker.prompts,
            rows=rows,
            first_group=first_group,
            out_key=stage.out_key,
        )
    parts = [
        Part.of(
            prompters(run.engines),
            PromptMaker.prompts,
            rows=rows[start:stop],
            first_group=None,
            out_key=run.files.stage_key(step, "prompts", f"{number}-{part}", key),
        )
        for part, (start, stop) in enumerate(cuts, 1)
    ]
    results = spread(run, step, "prompts", parts, PromptsResult)
    dropped = tuple(row for part in results for row in part.dropped)
    refs = [part.ref for part in results if part.ref is not None]
    if not refs:
        return PromptsResult(ref=None, dropped=dropped)
    ref = BatchRef.concat(refs)
    groups = {"group_id": np.arange(first_group, first_group + len(ref), dtype=np.int64)}
    numbered = run.files.stage_key(step, "prompts", f"{number}-groups", key)
    return PromptsResult(
        ref=ref.with_columns(write_batch(run.store, numbered, groups)), dropped=dropped
    )
