"""A user's own flow, as it stands in a folder of theirs: GRPO's step without its options."""

import sys

from prefect import flow
from prefect.states import State
from pydantic import Field

from configs.grpo import GRPOConfig
from tasks.advantage import advantage
from tasks.commit import sync_and_commit
from tasks.draw import draw
from tasks.launch.command_line import main
from tasks.results import RunSummary, StepSummary
from tasks.reward import reward_shards
from tasks.rollout import rollout_shards
from tasks.run.flow_options import RUN, STEP
from tasks.run.run import Run, StartedRun
from tasks.train import train
from tasks.update import update


class MyConfig(GRPOConfig):
    patience: int = Field(3, description="A setting of my own.")


@flow(name="mine-step", **STEP)
def my_step(run: Run, step: int) -> StepSummary:
    prompts = draw.submit(run, step)
    sampled = rollout_shards(run, step, prompts)
    scored = reward_shards(run, step, sampled)
    run.gate.wait_to_train(step)
    batch = advantage.submit(run, step, scored, None)
    updated = update.submit(run, step, batch)
    return sync_and_commit(run, step, prompts, scored, batch, updated)


@flow(name="mine", **RUN)
def my_flow(
    config: MyConfig, resume: str | None = None, fork: str | None = None, run: StartedRun = None
) -> RunSummary | State[None]:
    return train(my_step, config, resume, fork, run)


if __name__ == "__main__":
    sys.exit(main("my_flows:my_flow", MyConfig))
