"""DAPO: GRPO with dynamic sampling. Groups that can teach nothing are replaced by new ones.

    refrain dapo [RECIPE] [key=value …]

The tasks are GRPO's (flows/grpo.py), and sampling goes in rounds, until enough groups have rewards
that differ (tasks/dynamic_sampling.py). The clip, the selection and the penalty for long answers are
settings, whose defaults here are the paper's (configs/dapo.py, arXiv:2503.14476).
"""

from __future__ import annotations

import sys

from configs.dapo import DAPOConfig
from tasks.launch.command_line import main

if __name__ == "__main__":  # first: --help and a refused setting need nothing of what follows
    sys.exit(main("flows.dapo:dapo", DAPOConfig))

from prefect import flow
from prefect.states import State

from tasks.advantage import advantage
from tasks.commit import sync_and_commit
from tasks.dynamic_sampling import Rounds, draw_round, with_round
from tasks.logprob import logprob
from tasks.results import RunSummary, StepSummary
from tasks.reward import reward_shards
from tasks.rollout import rollout_shards
from tasks.run.flow_options import RUN, STEP
from tasks.run.run import Run, StartedRun
from tasks.train import train
from tasks.update import update


@flow(name="dapo-step", **STEP)
def dapo_step(run: Run, step: int) -> StepSummary:
    """One RL step: rounds of sampling, until there are groups enough to train version step."""
    rounds = Rounds()
    while not rounds.over:
        prompts = draw_round.submit(run, step, rounds)
        sampled = rollout_shards(run, step, prompts)
        scored = reward_shards(run, step, sampled, rounds.scored)
        rounds = with_round(run, step, rounds, prompts, scored)
    run.gate.wait_to_train(step)
    logprobs = logprob.submit(run, step, rounds.kept) if run.needs_logprobs else None
    batch = advantage.submit(run, step, rounds.scored, logprobs)
    updated = update.submit(run, step, batch)
    return sync_and_commit(run, step, rounds.prompts, rounds.scored, batch, updated)


@flow(name="dapo", **RUN)
def dapo(
    resume: str | None = None,
    fork: str | None = None,
    *,
    config: DAPOConfig,
    run: StartedRun = None,
) -> RunSummary | State[None]:
    """Post-train a language model by DAPO.

    Args:
        resume: name of a run in the store that is to go on from its last committed step.
        fork: RUN@STEP of the store, where a new run is to begin.
        config: the run's settings.
    """
    return train(dapo_step, config, resume, fork, run)
