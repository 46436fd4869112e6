"""PPO: a critic says what each state is worth; the policy is moved to what turned out better.

    python -m flows.ppo [RECIPE] [key=value …]

The tasks are GRPO's (flows/grpo.py) and two more: the critic's values before the advantages, and
its update beside the policy's. The critic lives on the policy's workers unless
cluster.roles.critic names a pool of its own.
"""

from __future__ import annotations

import sys

from prefect import flow, tags

from configs.ppo import PPOConfig
from tasks.advantage import advantage
from tasks.commit import commit, snapshot
from tasks.draw import draw
from tasks.launch.command_line import main
from tasks.logprob import logprob
from tasks.promotion import judge_policy
from tasks.reporting.flow_run import untagged_tasks
from tasks.results import RunSummary, StepSummary, result_of
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.run.run import Run, open_run
from tasks.start import start_engines
from tasks.update import critic_update, update
from tasks.values import values
from tasks.weight_sync import weight_sync


@flow(name="ppo-step", flow_run_name="step {step}", validate_parameters=False)
def ppo_step(run: Run, step: int) -> StepSummary:
    """One RL step: policy and critic of version step - 1 go in, those of version step come out."""
    shards = run.config.rollout.shards
    numbers = range(1, shards + 1)
    run.begin(step)
    with untagged_tasks():
        prompts = draw.submit(run, step)
        sampled = [rollout.submit(run, step, prompts, shard, shards) for shard in numbers]
        scored = [reward.submit(run, step, sampled[n - 1], n, shards) for n in numbers]
        valued = values.submit(run, step, sampled)
        logprobs = logprob.submit(run, step, sampled) if run.needs_logprobs else None
        batch = advantage.submit(run, step, scored, logprobs, valued)
        updated = update.submit(run, step, batch)
        critic = critic_update.submit(run, step, batch)
        synced = weight_sync.submit(run, step, updated)
        if run.snapshot_due(step):
            updated = snapshot.submit(run, step, updated, wait_for=[synced, critic])
        committed = commit.submit(run, step, prompts, scored, batch, updated, synced, critic)
        parts = [prompts, *sampled, *scored, valued, logprobs, batch, critic, updated, synced]
        return result_of(committed, *parts)


@flow(name="ppo", flow_run_name="{config.name}", persist_result=False)
def ppo(config: PPOConfig, resume: str | None = None, fork: str | None = None) -> RunSummary:
    """Post-train a language model by PPO with a critic.

    Args:
        config: the run's settings.
        resume: name of a run in the store that is to go on from its last committed step.
        fork: RUN@STEP of the store, where a new run is to begin.
    """
    with open_run(config, resume, fork) as run:
        start_engines(run)
        for step in run.steps_left():
            with tags(f"step {step}"):
                ppo_step(run, step)
        judge_policy(run)
        return run.summary()


if __name__ == "__main__":
    sys.exit(main(ppo, PPOConfig))
