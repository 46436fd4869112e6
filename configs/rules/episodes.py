"""Where an episode's environment is asked for its reward."""

from collections.abc import Iterable

from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _of_environment(config: RunConfig) -> Iterable[int]:
    """Positions of the rewards that an environment gives."""
    functions = enumerate(config.rewards.functions)
    return [number for number, function in functions if function.kind == "environment"]


EPISODES: tuple[Rule[RunConfig], ...] = (
    of_each(
        _of_environment,
        needs=lambda config, number: config.episodes is not None,
        says=lambda config, number: (
            f"rewards.functions.{number}.kind = environment is the reward of an "
            "episode's environment, and episodes = null has none. Set episodes.environment."
        ),
    ),
    of_each(
        _of_environment,
        needs=lambda config, number: (
            config.episodes is None or config.episodes.environment.kind != "tools"
        ),
        says=lambda config, number: (
            f"rewards.functions.{number}.kind = environment is the reward of an "
            "episode's environment, and functions give none. Set episodes.environment.kind = "
            "class, or rewards.functions to functions that score the answer."
        ),
    ),
)
