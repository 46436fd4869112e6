"""A user's flow that Prefect tries again, and whose third step fails the first time."""

import sys
from pathlib import Path

from my_flows import MyConfig, my_step  # type: ignore[import-not-found]
from prefect import flow
from prefect.states import State

from tasks.launch.command_line import main
from tasks.results import RunSummary, StepSummary
from tasks.run.flow_options import RUN, STEP
from tasks.run.run import Run, StartedRun
from tasks.train import train


@flow(name="retried-step", **STEP)
def retried_step(run: Run, step: int) -> StepSummary:
    failed = Path("failed")
    if step == 3 and not failed.exists():
        failed.touch()
        raise RuntimeError("the disk is full")
    return my_step.fn(run, step)


@flow(name="retried", retries=1, **RUN)
def retried(
    config: MyConfig, resume: str | None = None, fork: str | None = None, run: StartedRun = None
) -> RunSummary | State[None]:
    return train(retried_step, config, resume, fork, run)


if __name__ == "__main__":
    sys.exit(main("my_retried_flow:retried", MyConfig))
