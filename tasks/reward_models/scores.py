"""The scores of reward models and judges, which are made before reward functions are called."""

from __future__ import annotations

from engines.data.contract import ModelScores
from engines.reward_models.contract import RewardModels
from tasks.reward_models.role import REWARD_MODEL
from tasks.run.contract import StageView
from tasks.run.features import ScoredFirst
from tasks.run.stage import Stage


def model_scores(run: StageView, asked: ScoredFirst) -> ModelScores | None:
    """Scores of some samples; None where nothing that scores them is a model."""
    if not run.config.rewards.on_engines:
        return None
    piece = Stage(run=run, step=asked.step, name="reward_model", key=asked.key, shard=asked.number)
    return piece.call(
        run.engines[REWARD_MODEL],
        RewardModels.score,
        prompts=asked.request.prompts,
        samples=asked.request.samples,
        out_key=piece.out_key,
    )
