"""Evaluate versions of a run in the store by suites of today; nothing is asked twice.

refrain evaluate RUN --suite NAME [--versions 0,10|all] [--against RUN2] [key=value …]
"""

from __future__ import annotations

import sys
import time
from functools import partial

from configs.evaluation import BackFillConfig
from tasks.commands.evaluate import main

if __name__ == "__main__":  # first: --help and a refused word need nothing of what follows
    sys.exit(main("flows.evaluate:evaluate"))

from prefect import flow
from prefect.states import State

from tasks.evaluation.back_fill import BackFilled, back_fill, subjects_of
from tasks.reporting.listeners import evaluation_listeners
from tasks.reporting.terminal import Terminal
from tasks.run.flow_options import TaskThreads
from tasks.run.flow_run import evaluation_name
from tasks.run.life_cycle import or_cancelled


@flow(
    name="evaluate",
    flow_run_name=evaluation_name,
    persist_result=False,
    task_runner=TaskThreads(),
)
def evaluate(config: BackFillConfig) -> BackFilled | State[None]:
    """Evaluate policy versions of a run in the store by suites.

    Args:
        config: which run, suites and versions.
    """
    listeners_of = partial(evaluation_listeners, Terminal())
    return or_cancelled(
        lambda: back_fill(subjects_of(config), time.time(), listeners_of),
    )
