"""What a policy that looks at images goes with."""

from collections.abc import Callable, Iterable

from configs.episodes import EpisodesConfig
from configs.rules.rule import Rule, of_each, where
from configs.run import RunConfig

FRAMES = "episodes.sees = frames"
KINDS = ("class", "gymnasium")  # of environments that have frames


def _seen(config: RunConfig) -> Iterable[EpisodesConfig]:
    """The episodes whose frames the policy looks at; nothing where it does not."""
    return [] if config.episodes is None or not config.sees_frames else [config.episodes]


def _never_with(
    applies: Callable[[RunConfig], bool], what: Callable[[RunConfig], str] | str, remedy: str
) -> Rule[RunConfig]:
    return Rule(
        needs=lambda config: not applies(config),
        says=lambda config: (
            f"{FRAMES} does not go with {what if isinstance(what, str) else what(config)}. {remedy}."
        ),
    )


IMAGES: tuple[Rule[RunConfig], ...] = (
    of_each(
        _seen,
        needs=lambda config, _: config.rollout.engine == "transformers",
        says=lambda config, _: (
            f"{FRAMES} shows images to the policy, and rollout.engine = {config.rollout.engine} does "
            "not. Set rollout.engine = transformers."
        ),
    ),
    of_each(
        _seen,
        needs=lambda config, episodes: episodes.environment.kind in KINDS,
        says=lambda config, episodes: (
            f"episodes.environment.kind = {episodes.environment.kind} gives no frames, which "
            f"{FRAMES} shows to the policy. Set it to gymnasium, or to class with a method frame()."
        ),
    ),
    of_each(
        _seen,
        needs=lambda config, episodes: episodes.players == 1,
        says=lambda config, episodes: (
            f"episodes.players = {episodes.players}, and {FRAMES} is of one who acts alone. Set "
            "episodes.players = 1."
        ),
    ),
    of_each(
        _seen,
        needs=lambda config, episodes: episodes.max_turn_tokens is not None,
        says=lambda config, episodes: (
            f"{FRAMES} has turns of action tokens, none of which ends a turn, and "
            "episodes.max_turn_tokens = null is no number. Set it to the tokens of an action, with "
            "episodes.full_turn = counts."
        ),
    ),
    *where(
        lambda config: config.sees_frames,
        _never_with(
            lambda config: config.algorithm.needs_baselines,
            "greedy baselines",
            "Set algorithm.advantage.kind = grpo",
        ),
        _never_with(lambda config: config.lora is not None, "adapters", "Set lora = null"),
        _never_with(
            lambda config: config.train.engine != "fsdp",
            lambda config: f"train.engine = {config.train.engine}",
            "Set train.engine = fsdp",
        ),
        _never_with(
            lambda config: config.train.tree_training,
            "train.tree_training",
            "Set train.tree_training = false",
        ),
        _never_with(
            lambda config: config.train.sequence_parallel > 1,
            lambda config: f"train.sequence_parallel = {config.train.sequence_parallel}",
            "Set train.sequence_parallel = 1",
        ),
        _never_with(
            lambda config: config.carries, "rollout.partial_rollout = carry", "Set it to off"
        ),
        _never_with(
            lambda config: config.evaluation is not None,
            "an evaluation",
            "Set evaluation = null",
        ),
    ),
)
