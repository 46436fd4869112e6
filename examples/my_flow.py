"""A flow of your own: rejection-sampling fine-tuning (RAFT, arXiv:2304.06767).

    python -m my_flow own.yaml      # also --resume RUN, --fork RUN@STEP, --help, --check

Sample a group of completions for each prompt, keep the best one, and make it more likely. There is no
comparison within the group, no ratio to an older policy and no clip.
"""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import flow
from prefect.states import State
from pydantic import Field

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.corrections import BestOfSelection
from configs.algorithm.losses import ReinforceLoss
from configs.base import UserFunction
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

ONE = f"{Path(__file__).with_name('estimator.py')}:one"


class RAFTConfig(GRPOConfig):
    """Settings of a run, with another algorithm by default."""

    algorithm: AlgorithmConfig = Field(
        AlgorithmConfig(
            selection=(BestOfSelection(best=1),),
            advantage=UserFunction(path=ONE),
            loss=ReinforceLoss(),
        ),
        description="The best of each group, by maximum likelihood.",
    )


@flow(name="raft-step", **STEP)
def raft_step(run: Run, step: int) -> StepSummary:
    """One step: the policy of version step - 1 samples, and learns the best of what it sampled."""
    prompts = draw.submit(run, step)
    sampled = rollout_shards(run, step, prompts)
    scored = reward_shards(run, step, sampled)
    run.gate.wait_to_train(step)
    best = advantage.submit(run, step, scored, None)
    updated = update.submit(run, step, best)
    return sync_and_commit(run, step, prompts, scored, best, updated)


@flow(name="raft", **RUN)
def raft(
    config: RAFTConfig, resume: str | None = None, fork: str | None = None, run: StartedRun = None
) -> RunSummary | State[None]:
    """Post-train a language model on the best of its own completions."""
    return train(raft_step, config, resume, fork, run)


if __name__ == "__main__":
    sys.exit(main("my_flow:raft", RAFTConfig))
