"""That samples are scored, by what can score them."""

from collections.abc import Iterable

from configs.data import ReasoningGymSource
from configs.reward_model import RewardModelReward
from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _positions(config: RunConfig) -> Iterable[int]:
    return range(len(config.rewards.functions))


def _models(config: RunConfig) -> Iterable[RewardModelReward]:
    return config.rewards.models


def _alone(config: RunConfig) -> str | None:
    """The setting by which some prompt has a single answer; None where none does."""
    setting, size = config.smallest_group
    if size == 1:
        return f"{setting} = 1"
    suites = {} if config.evaluation is None else config.evaluation.suites
    for name, suite in suites.items():
        if suite.rewards is None and suite.samples == 1:
            return f"evaluation.suites.{name}.samples = 1"
    if config.algorithm.needs_baselines:
        return f"algorithm.advantage.kind = {config.algorithm.advantage.kind}"
    return None


def _gym_sources(config: RunConfig, position: int) -> int:
    """How many sources of reasoning-gym a reward scores; 0 where it scores others too."""
    data = config.data.scored_by(config.rewards.functions[position].label)
    gym = [isinstance(one.source, ReasoningGymSource) for one in data]
    return len(gym) if all(gym) else 0


REWARDS: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not config.needs_rewards or len(config.rewards.functions) > 0,
        says=lambda config: (
            "rewards.functions is empty, so every sample would be worth the same. Set "
            "rewards.functions, such as [{kind: math}]."
        ),
    ),
    of_each(
        _positions,
        needs=lambda config, position: (
            config.rewards.functions[position].kind != "reasoning_gym"
            or _gym_sources(config, position) == 1
        ),
        says=lambda config, position: (
            f"rewards.functions.{position}.kind = reasoning_gym scores only reasoning-gym "
            f"problems, but data.source.kind = {config.data.source.kind}. "
            "Set it to math or function."
            if not config.data.tasks
            else f"rewards.functions.{position}.kind = reasoning_gym scores the problems of one "
            "reasoning-gym task. Give each such task one, with a name of its own, and name it in "
            "the task's rewards."
        ),
    ),
    of_each(
        _models,
        needs=lambda config, model: model.pairwise is None or _alone(config) is None,
        says=lambda config, model: (
            f"The reward {model.label} compares the answers to a prompt, and {_alone(config)} has "
            "prompts with one answer. Set more, or pairwise = null with a model that scores "
            "each alone."
        ),
    ),
)
