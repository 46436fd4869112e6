"""Where an episode's environment is asked for its reward."""

from collections.abc import Iterable

from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _of_environment(config: RunConfig) -> Iterable[int]:
    """Positions of the rewards that an environment gives."""
    functions = enumerate(config.rewards.functions)
    return [number for number, function in functions if function.kind == "environment"]


def _scored(config: RunConfig, position: int) -> set[str]:
    """Kinds of the environments that a reward asks for theirs, of all tasks that it scores."""
    played, label = config.played, config.rewards.functions[position].label
    if not config.data.tasks:
        return {one.environment.kind for one in played.values()}
    own = {name: config.data.rewards_of(name) for name in played}
    return {
        one.environment.kind
        for name, one in played.items()
        if (names := own[name]) is None or label in names
    }


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
        needs=lambda config, number: "tools" not in _scored(config, number),
        says=lambda config, number: (
            f"rewards.functions.{number}.kind = environment is the reward of an "
            "episode's environment, and functions give none. Set episodes.environment.kind = "
            "class, or rewards.functions to functions that score the answer."
        ),
    ),
    of_each(
        _of_environment,
        needs=lambda config, number: "none" not in _scored(config, number),
        says=lambda config, number: (
            f"rewards.functions.{number}.kind = environment is the reward of an episode's "
            "environment, and it scores rows without one (kind none). Name it in the rewards of "
            "the tasks that have one, data.source.tasks.*.rewards."
        ),
    ),
    Rule(
        needs=lambda config: (
            config.episodes is None
            or any(one.environment.kind != "none" for one in config.played.values())
        ),
        says=lambda config: (
            "episodes.environment.kind = none plays nothing, and no task has an environment of its "
            "own. Set episodes = null, or data.source.tasks.*.environment."
        ),
    ),
)
