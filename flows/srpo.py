"""SRPO: GRPO on episodes whose failures are rewarded by how near they came to a success.

    refrain srpo [RECIPE] [key=value …]

The tasks are GRPO's (flows/grpo.py) and two more: embeddings of what each episode saw, and progress
rewards, which compare them over the whole step. arXiv:2511.15605.
"""

from __future__ import annotations

import sys

from configs.srpo import SRPOConfig
from tasks.launch.command_line import main

if __name__ == "__main__":  # first: --help and a refused setting need nothing of what follows
    sys.exit(main("flows.srpo:srpo", SRPOConfig))

from prefect import flow
from prefect.states import State

from tasks.advantage import advantage
from tasks.commit import sync_and_commit
from tasks.draw import draw
from tasks.logprob import logprob
from tasks.progress_rewards.progress import embedding_shards, progress
from tasks.results import RunSummary, StepSummary
from tasks.reward import reward_shards
from tasks.rollout import rollout_shards
from tasks.run.flow_options import RUN, STEP
from tasks.run.run import Run, StartedRun
from tasks.train import train
from tasks.update import update


@flow(name="srpo-step", **STEP)
def srpo_step(run: Run, step: int) -> StepSummary:
    """One RL step: the policy of version step - 1 acts, version step comes out."""
    prompts = draw.submit(run, step)
    sampled = rollout_shards(run, step, prompts)
    embedded = embedding_shards(run, step, sampled)
    scored = progress.submit(run, step, reward_shards(run, step, sampled), embedded)
    run.gate.wait_to_train(step)
    logprobs = logprob.submit(run, step, sampled) if run.needs_logprobs else None
    batch = advantage.submit(run, step, scored, logprobs)
    updated = update.submit(run, step, batch)
    return sync_and_commit(run, step, prompts, scored, batch, updated)


@flow(name="srpo", **RUN)
def srpo(
    resume: str | None = None,
    fork: str | None = None,
    *,
    config: SRPOConfig,
    run: StartedRun = None,
) -> RunSummary | State[None]:
    """Post-train a policy that acts in episodes by SRPO.

    Args:
        resume: name of a run in the store that is to go on from its last committed step.
        fork: RUN@STEP of the store, where a new run is to begin.
        config: the run's settings.
    """
    return train(srpo_step, config, resume, fork, run)
