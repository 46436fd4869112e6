"""What a run of several tasks adds: which rows a step draws."""

from __future__ import annotations

from tasks.run.features import Feature
from tasks.several_tasks.drawing import RowsOfTasks

FEATURE = Feature(next_rows=RowsOfTasks)
