"""Episodes: where an environment is asked for its reward, and those that may be forests of requests.

Forests are of agents that ask in parallel, or begin anew.
"""

from collections.abc import Iterable

from configs.algorithm.advantages import (
    GAEAdvantage,
    GRPOAdvantage,
    MultiTurnOptimalTokenBaselineAdvantage,
    OptimalTokenBaselineAdvantage,
    ReinforceAdvantage,
    ReinforcePlusPlusAdvantage,
)
from configs.rules.rule import Rule, of_each, where
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


def _along_one_path(config: RunConfig) -> tuple[str, str]:
    """The setting by which advantages go from token to token, and its remedy; empty: none does."""
    advantage, name = config.algorithm.advantage, "algorithm.advantage"
    if isinstance(
        advantage, OptimalTokenBaselineAdvantage | MultiTurnOptimalTokenBaselineAdvantage
    ):
        return f"{name}.kind = {advantage.kind}", f"{name}.kind = grpo"
    if isinstance(advantage, GAEAdvantage) and advantage.lam < 1:
        return f"{name}.lam = {advantage.lam:g}", f"{name}.lam = 1"
    discounted = GAEAdvantage | ReinforceAdvantage | ReinforcePlusPlusAdvantage
    if isinstance(advantage, discounted) and advantage.gamma < 1:
        return f"{name}.gamma = {advantage.gamma:g}", f"{name}.gamma = 1"
    return "", ""


def _most(config: RunConfig) -> int:
    assert config.episodes is not None and config.episodes.max_tokens is not None
    return config.episodes.max_tokens


# Estimators that compare a sample's reward with those of its group alone.
_WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo", "opo", "maxrl")


def _compares_groups(config: RunConfig) -> bool:
    """Whether the estimator looks at nothing beyond a group."""
    advantage = config.algorithm.advantage
    beyond = isinstance(advantage, GRPOAdvantage) and not {"batch", "task"}.isdisjoint(
        (advantage.baseline, advantage.normalize)
    )
    return advantage.kind in _WITHIN_GROUPS and not beyond


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
    *where(
        lambda config: any(one.credit == "branch" for one in config.played.values()),
        Rule[RunConfig](
            needs=_compares_groups,
            says=lambda config: (
                "episodes.credit = branch compares a branch with those of its group, and "
                f"algorithm.advantage.kind = {config.algorithm.advantage.kind} compares otherwise. "
                f"Set it to one of {', '.join(_WITHIN_GROUPS)}, without batch and task, or "
                "episodes.credit = episode."
            ),
        ),
        Rule[RunConfig](
            needs=lambda config: (
                [one.weight for one in config.rewards.functions if one.kind == "environment"]
                == [1.0]
            ),
            says=lambda config: (
                "episodes.credit = branch adds what the agent gives a branch to all other rewards. "
                "Have one of rewards.functions be {kind: environment}, with weight 1."
            ),
        ),
    ),
    *where(
        lambda config: config.plays_requests,
        Rule[RunConfig](
            needs=lambda config: not config.train.router_replay,
            says=lambda config: (
                "train.router_replay = true takes the experts of a conversation that grows at its "
                "end, and agents' turns, or those of episodes.past_turns = as_rendered, are each "
                "sampled after a sequence of their own. Set train.router_replay = false."
            ),
            new_runs_only=True,
        ),
    ),
    *where(
        lambda config: config.most_paths > 1,
        Rule[RunConfig](
            needs=lambda config: not _along_one_path(config)[0],
            says=lambda config: (
                f"{_along_one_path(config)[0]} goes from each token to the next one, and episodes "
                f"may branch, where several come next. Set {_along_one_path(config)[1]}, or for an "
                "agent episodes.branches = false."
            ),
            new_runs_only=True,
        ),
    ),
    *where(
        lambda config: config.episodes is not None and config.episodes.max_tokens is not None,
        Rule[RunConfig](
            needs=lambda config: config.most_paths > 1,
            says=lambda config: (
                f"episodes.max_tokens = {_most(config)} is of all branches of an episode, and these "
                "episodes have one. Set it to null; rollout.max_new_tokens is their limit."
            ),
        ),
        Rule[RunConfig](
            needs=lambda config: _most(config) >= config.rollout.max_new_tokens,
            says=lambda config: (
                f"episodes.max_tokens = {_most(config)} is of all branches of an episode, and one of "
                f"them has up to rollout.max_new_tokens = {config.rollout.max_new_tokens}. Set it to "
                "at least that, or to null, which is that."
            ),
        ),
        Rule[RunConfig](
            needs=lambda config: (
                (penalty := config.algorithm.shaping.overlong) is None
                or penalty.max_tokens is not None
            ),
            says=lambda config: (
                "algorithm.shaping.overlong goes by rollout.max_new_tokens, and "
                f"episodes.max_tokens = {_most(config)} is the limit of an episode. Set "
                "algorithm.shaping.overlong.max_tokens."
            ),
        ),
    ),
)
