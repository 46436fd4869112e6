"""Thoughts with a budget (`rollout.thinking`)."""

from configs.rollout import ThinkingConfig
from configs.rules.rule import Rule, where
from configs.run import RunConfig


def _thinking(config: RunConfig) -> ThinkingConfig:
    assert config.rollout.thinking is not None
    return config.rollout.thinking


def _longest_turn(config: RunConfig) -> tuple[str, int]:
    """The setting that bounds a turn, and its tokens; of several tasks, the shortest."""
    turns = [one.max_turn_tokens for one in config.played.values()]
    if bounds := [turn for turn in turns if turn is not None]:
        return "episodes.max_turn_tokens", min(bounds)
    return "rollout.max_new_tokens", config.rollout.max_new_tokens


THINKING: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.rollout.thinking is not None,
    Rule[RunConfig](
        needs=lambda config: _thinking(config).budget < _longest_turn(config)[1],
        says=lambda config: (
            f"rollout.thinking.budget = {_thinking(config).budget} leaves no answer within "
            f"{' = '.join(map(str, _longest_turn(config)))} tokens. Set it lower, or "
            f"{_longest_turn(config)[0]} higher."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: not config.sees_frames,
        says=lambda config: (
            "rollout.thinking does not go with episodes.sees = frames. Set rollout.thinking = null."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: not config.train.router_replay,
        says=lambda config: (
            "rollout.thinking puts words into completions whose experts no engine has told, and "
            "train.router_replay = true needs those of each token. Set one of them to null or false."
        ),
    ),
)
