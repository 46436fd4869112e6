"""What guards add to a run: they judge its steps, and may end it or have it go on from earlier."""

from __future__ import annotations

from tasks.guards.acting import carry_out, judge_step, take_up
from tasks.guards.judging import check_rollbacks, guard_table
from tasks.guards.listener import listen
from tasks.run.features import Feature

FEATURE = Feature(
    check_settings=check_rollbacks,
    judge=judge_step,
    committed=carry_out,
    take_up=take_up,
    listen=listen,
    page=guard_table,
)
