"""What reward models, and judges that the run starts itself, add to a run."""

from __future__ import annotations

from configs.rewards import RewardsConfig
from engines.reward_models.model import check_local_judge, check_reward_model
from tasks.reward_models.memory import holders
from tasks.reward_models.role import REWARD_MODEL, of_suite
from tasks.reward_models.scores import model_scores
from tasks.run.features import Feature


def _check(rewards: RewardsConfig) -> None:
    for reward in rewards.models:
        check_reward_model(reward)
    for judge in rewards.judges:
        check_local_judge(judge)


FEATURE = Feature(
    roles=(REWARD_MODEL,),
    check_rewards=_check,
    holders=holders,
    scores=model_scores,
    of_suite=of_suite,
)
