"""Episodes that may be forests of requests: agents that ask in parallel, or begin anew."""

from configs.algorithm.advantages import (
    GAEAdvantage,
    MultiTurnOptimalTokenBaselineAdvantage,
    OptimalTokenBaselineAdvantage,
    ReinforceAdvantage,
    ReinforcePlusPlusAdvantage,
)
from configs.rules.rule import Rule, where
from configs.run import RunConfig


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


BRANCHES: tuple[Rule[RunConfig], ...] = (
    *where(
        lambda config: config.episodes is not None and config.episodes.are_forests,
        Rule[RunConfig](
            needs=lambda config: not _along_one_path(config)[0],
            says=lambda config: (
                f"{_along_one_path(config)[0]} goes from each token to the next one, and episodes "
                f"may branch, where several come next. Set {_along_one_path(config)[1]}."
            ),
            new_runs_only=True,
        ),
    ),
    *where(
        lambda config: config.episodes is not None and config.episodes.max_tokens is not None,
        Rule[RunConfig](
            needs=lambda config: config.episodes is not None and config.episodes.are_forests,
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
