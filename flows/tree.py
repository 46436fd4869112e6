"""Tree rollouts, TreePO: a prompt's completions share their beginnings, and are compared by subtree.

    refrain tree [RECIPE] [key=value …]

The tasks are GRPO's (flows/grpo.py), but the completions of a prompt are the leaves of a tree whose
nodes are segments: what several of them share is sampled once. arXiv:2508.17445.
"""

from __future__ import annotations

import sys

from configs.tree import TreeConfig
from tasks.launch.command_line import main

if __name__ == "__main__":  # first: --help and a refused setting need nothing of what follows
    sys.exit(main("flows.tree:tree", TreeConfig))

from prefect import flow
from prefect.states import State

from tasks.advantage import advantage
from tasks.commit import sync_and_commit
from tasks.draw import draw
from tasks.logprob import logprob
from tasks.results import RunSummary, StepSummary
from tasks.reward import reward_shards
from tasks.run.flow_options import RUN, STEP
from tasks.run.run import Run, StartedRun
from tasks.train import train
from tasks.trees.tree import tree_shards
from tasks.update import update


@flow(name="tree-step", **STEP)
def tree_step(run: Run, step: int) -> StepSummary:
    """One RL step: the policy of version step - 1 grows the trees, version step comes out."""
    prompts = draw.submit(run, step)
    sampled = tree_shards(run, step, prompts)
    scored = reward_shards(run, step, sampled)
    run.gate.wait_to_train(step)
    logprobs = logprob.submit(run, step, sampled) if run.needs_logprobs else None
    batch = advantage.submit(run, step, scored, logprobs)
    updated = update.submit(run, step, batch)
    return sync_and_commit(run, step, prompts, scored, batch, updated)


@flow(name="tree", **RUN)
def tree(
    resume: str | None = None,
    fork: str | None = None,
    *,
    config: TreeConfig,
    run: StartedRun = None,
) -> RunSummary | State[None]:
    """Post-train a language model on trees of completions (TreePO).

    Args:
        resume: name of a run in the store that is to go on from its last committed step.
        fork: RUN@STEP of the store, where a new run is to begin.
        config: the run's settings.
    """
    return train(tree_step, config, resume, fork, run)
