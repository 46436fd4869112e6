"""Go on with a run in the store from its last commit, by the flow that made it: a deployment's form.

On a command line: refrain grpo --resume RUN
"""

from __future__ import annotations

from prefect import flow
from prefect.states import State

from configs.resume import ResumeConfig
from tasks.commands.resume import go_on
from tasks.results import RunSummary
from tasks.run.flow_options import RUN


@flow(name="resume", **RUN)
def resume(config: ResumeConfig) -> RunSummary | State[None]:
    """Go on with a run in the store.

    Args:
        config: which run, and what changes.
    """
    return go_on(config)
