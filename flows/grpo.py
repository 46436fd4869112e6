"""GRPO: sample groups of completions, score them, prefer the better of each group.

    python -m flows.grpo [RECIPE] [key=value …]

The flow process holds neither tensors nor engines: every stage is a task that hands refs to a
worker and returns refs.
"""

from __future__ import annotations

import sys

from prefect import flow, tags
from prefect.states import State

from configs.grpo import GRPOConfig
from tasks.advantage import advantage
from tasks.baseline import baseline
from tasks.commit import commit, snapshot
from tasks.draw import draw
from tasks.launch.command_line import main
from tasks.logprob import logprob
from tasks.promotion import judge_policy
from tasks.reporting.flow_run import untagged_tasks
from tasks.results import RunSummary, StepSummary, result_of
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.run.continue_from import NothingNew, skipped
from tasks.run.run import Run, open_run
from tasks.start import start_engines
from tasks.update import update
from tasks.weight_sync import weight_sync


@flow(name="grpo-step", flow_run_name="step {step}", validate_parameters=False)
def grpo_step(run: Run, step: int) -> StepSummary:
    """One RL step: the policy of version step - 1 samples, version step comes out."""
    shards = run.config.rollout.shards
    numbers = range(1, shards + 1)
    run.begin(step)
    with untagged_tasks():
        prompts = draw.submit(run, step)
        sampled = [rollout.submit(run, step, prompts, shard, shards) for shard in numbers]
        scored = [reward.submit(run, step, sampled[n - 1], n, shards) for n in numbers]
        greedy = [
            baseline.submit(run, step, prompts, shard, shards)
            for shard in numbers
            if run.needs_baselines
        ]
        logprobs = logprob.submit(run, step, sampled) if run.needs_logprobs else None
        batch = advantage.submit(run, step, scored, logprobs, greedy=greedy)
        updated = update.submit(run, step, batch)
        synced = weight_sync.submit(run, step, updated)
        if run.snapshot_due(step):
            updated = snapshot.submit(run, step, updated, wait_for=[synced])
        committed = commit.submit(run, step, prompts, scored, batch, updated, synced)
        parts = [prompts, *sampled, *scored, *greedy, logprobs, batch, updated, synced]
        return result_of(committed, *parts)


@flow(name="grpo", flow_run_name="{config.name}", persist_result=False)
def grpo(
    config: GRPOConfig, resume: str | None = None, fork: str | None = None
) -> RunSummary | State[None]:
    """Post-train a language model by GRPO.

    Args:
        config: the run's settings.
        resume: name of a run in the store that is to go on from its last committed step.
        fork: RUN@STEP of the store, where a new run is to begin.
    """
    try:
        with open_run(config, resume, fork) as run:
            start_engines(run)
            for step in run.steps_left():
                with tags(f"step {step}"):
                    grpo_step(run, step)
            judge_policy(run)
            return run.summary()
    except NothingNew as nothing:
        return skipped(nothing)


if __name__ == "__main__":
    sys.exit(main(grpo, GRPOConfig))
