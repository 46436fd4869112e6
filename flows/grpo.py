"""GRPO: sample groups of completions, score them, prefer the better of each group.

    refrain grpo [RECIPE] [key=value …]

The flow process holds neither tensors nor engines: every stage is a task that hands refs to a
worker and returns refs.
"""

from __future__ import annotations

import sys

from configs.grpo import GRPOConfig
from tasks.launch.command_line import main

if __name__ == "__main__":  # first: --help and a refused setting need nothing of what follows
    sys.exit(main("flows.grpo:grpo", GRPOConfig))

from prefect import flow
from prefect.states import State

from tasks.advantage import advantage
from tasks.baseline import baseline_shards
from tasks.commit import sync_and_commit
from tasks.draw import draw
from tasks.logprob import logprob
from tasks.results import RunSummary, StepSummary
from tasks.reward import reward_shards
from tasks.rollout import rollout_shards
from tasks.run.flow_options import RUN, STEP
from tasks.run.run import Run, StartedRun
from tasks.train import train
from tasks.update import update


@flow(name="grpo-step", **STEP)
def grpo_step(run: Run, step: int) -> StepSummary:
    """One RL step: the policy of version step - 1 samples, version step comes out."""
    prompts = draw.submit(run, step)
    sampled = rollout_shards(run, step, prompts)
    scored = reward_shards(run, step, sampled)
    greedy = baseline_shards(run, step, prompts) if run.needs_baselines else []
    run.gate.wait_to_train(step)
    logprobs = logprob.submit(run, step, sampled) if run.needs_logprobs else None
    batch = advantage.submit(run, step, scored, logprobs, greedy=greedy)
    updated = update.submit(run, step, batch)
    return sync_and_commit(run, step, prompts, scored, batch, updated)


@flow(name="grpo", **RUN)
def grpo(
    resume: str | None = None,
    fork: str | None = None,
    *,
    config: GRPOConfig,
    run: StartedRun = None,
) -> RunSummary | State[None]:
    """Post-train a language model by GRPO.

    Args:
        resume: name of a run in the store that is to go on from its last committed step.
        fork: RUN@STEP of the store, where a new run is to begin.
        config: the run's settings.
    """
    return train(grpo_step, config, resume, fork, run)
