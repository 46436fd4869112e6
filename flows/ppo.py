"""PPO: a critic says what each state is worth; the policy is moved to what turned out better.

    refrain ppo [RECIPE] [key=value …]

The tasks are GRPO's (flows/grpo.py) and two more: the critic's values before the advantages, and
its update beside the policy's. The critic lives on the policy's workers unless
cluster.roles.critic names a pool of its own.
"""

from __future__ import annotations

import sys

from configs.ppo import PPOConfig
from tasks.launch.command_line import main

if __name__ == "__main__":  # first: --help and a refused setting need nothing of what follows
    sys.exit(main("flows.ppo:ppo", PPOConfig))

from prefect import flow
from prefect.states import State

from tasks.advantage import advantage
from tasks.commit import sync_and_commit
from tasks.critic.update import critic_update
from tasks.critic.values import values
from tasks.draw import draw
from tasks.logprob import logprob
from tasks.results import RunSummary, StepSummary
from tasks.reward import reward_shards
from tasks.rollout import rollout_shards
from tasks.run.flow_options import RUN, STEP
from tasks.run.run import Run, StartedRun
from tasks.train import train
from tasks.update import update


@flow(name="ppo-step", **STEP)
def ppo_step(run: Run, step: int) -> StepSummary:
    """One RL step: policy and critic of version step - 1 go in, those of version step come out."""
    prompts = draw.submit(run, step)
    sampled = rollout_shards(run, step, prompts)
    scored = reward_shards(run, step, sampled)
    run.gate.wait_to_train(step)
    valued = values.submit(run, step, sampled)
    logprobs = logprob.submit(run, step, sampled) if run.needs_logprobs else None
    batch = advantage.submit(run, step, scored, logprobs, valued)
    updated = update.submit(run, step, batch)
    critic = critic_update.submit(run, step, batch)
    return sync_and_commit(run, step, prompts, scored, batch, updated, critic)


@flow(name="ppo", **RUN)
def ppo(
    resume: str | None = None,
    fork: str | None = None,
    *,
    config: PPOConfig,
    run: StartedRun = None,
) -> RunSummary | State[None]:
    """Post-train a language model by PPO with a critic.

    Args:
        resume: name of a run in the store that is to go on from its last committed step.
        fork: RUN@STEP of the store, where a new run is to begin.
        config: the run's settings.
    """
    return train(ppo_step, config, resume, fork, run)
