"""Distillation: the student samples, a teacher scores its tokens, the student moves to the teacher.

    refrain distill [RECIPE] teachers.NAME.model.path=… [key=value …]

The tasks are GRPO's (flows/grpo.py) and one more: the teachers' log-probs, beside the rewards, if
there are any.
"""

from __future__ import annotations

import sys

from configs.distill import DistillConfig
from tasks.launch.command_line import main

if __name__ == "__main__":  # first: --help and a refused setting need nothing of what follows
    sys.exit(main("flows.distill:distill", DistillConfig))

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
from tasks.teachers.teacher import teacher_shards
from tasks.train import train
from tasks.update import update


@flow(name="distill-step", **STEP)
def distill_step(run: Run, step: int) -> StepSummary:
    """One step: the student of version step - 1 samples, version step is nearer to the teacher."""
    prompts = draw.submit(run, step)
    sampled = rollout_shards(run, step, prompts)
    taught = teacher_shards(run, step, sampled)
    scored = reward_shards(run, step, sampled)
    greedy = baseline_shards(run, step, prompts) if run.needs_baselines else []
    run.gate.wait_to_train(step)
    logprobs = logprob.submit(run, step, sampled) if run.needs_logprobs else None
    batch = advantage.submit(run, step, scored, logprobs, greedy=greedy, taught=taught)
    updated = update.submit(run, step, batch)
    return sync_and_commit(run, step, prompts, scored, batch, updated)


@flow(name="distill", **RUN)
def distill(
    resume: str | None = None,
    fork: str | None = None,
    *,
    config: DistillConfig,
    run: StartedRun = None,
) -> RunSummary | State[None]:
    """Teach a language model by what others say of its own samples.

    Args:
        resume: name of a run in the store that is to go on from its last committed step.
        fork: RUN@STEP of the store, where a new run is to begin.
        config: the run's settings.
    """
    return train(distill_step, config, resume, fork, run)
