"""The rules of episodes.sees = frames: what a run can do with a policy that looks at images."""

from configs.run import RunConfig

FRAMES = "episodes.sees = frames"
KINDS = ("class", "gymnasium")  # of environments that have frames


def check_image_policy(config: RunConfig) -> None:
    """ValueError, in one sentence, where such a policy cannot do what the settings ask for."""
    episodes, train = config.episodes, config.train
    assert episodes is not None
    if config.rollout.engine != "transformers":
        raise ValueError(
            f"{FRAMES} shows images to the policy, and rollout.engine = {config.rollout.engine} does "
            "not. Set rollout.engine = transformers."
        )
    if episodes.environment.kind not in KINDS:
        raise ValueError(
            f"episodes.environment.kind = {episodes.environment.kind} gives no frames, which "
            f"{FRAMES} shows to the policy. Set it to gymnasium, or to class with a method frame()."
        )
    if episodes.players > 1:
        raise ValueError(
            f"episodes.players = {episodes.players}, and {FRAMES} is of one who acts alone. Set "
            "episodes.players = 1."
        )
    if episodes.max_turn_tokens is None:
        raise ValueError(
            f"{FRAMES} has turns of action tokens, none of which ends a turn, and "
            "episodes.max_turn_tokens = null is no number. Set it to the tokens of an action, with "
            "episodes.full_turn = counts."
        )
    trained_as = (
        (config.has_critic, "a critic", "Run it with python -m flows.grpo"),
        (config.algorithm.needs_baselines, "greedy baselines", "Set algorithm.advantage = grpo"),
        (config.lora is not None, "adapters", "Set lora = null"),
        (train.engine != "fsdp", f"train.engine = {train.engine}", "Set train.engine = fsdp"),
        (train.tree_training, "train.tree_training", "Set train.tree_training = false"),
        (
            train.sequence_parallel > 1,
            f"train.sequence_parallel = {train.sequence_parallel}",
            "Set train.sequence_parallel = 1",
        ),
        (config.carries, "rollout.partial_rollout = carry", "Set it to off"),
        (config.evaluation is not None, "an evaluation", "Set evaluation = null"),
    )
    for asked, what, remedy in trained_as:
        if asked:
            raise ValueError(f"{FRAMES} does not go with {what}. {remedy}.")
