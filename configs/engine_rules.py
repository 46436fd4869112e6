"""The rules of engines that cannot do all: elastic workers, and a policy that looks at images."""

from configs.run import RunConfig

ELASTIC = "train.engine = elastic"
FRAMES = "episodes.sees = frames"
KINDS = ("class", "gymnasium")  # of environments that have frames


def check_elastic(config: RunConfig) -> None:
    """ValueError, in one sentence, where elastic workers cannot do what the settings ask for."""
    roles, loss = config.cluster.roles, config.algorithm.loss.kind
    if config.has_critic:
        raise ValueError(f"{ELASTIC} trains no critic. Set train.engine = fsdp, or run flows.grpo.")
    if config.lora is not None:
        raise ValueError(f"{ELASTIC} trains no adapters. Set train.engine = fsdp, or lora = null.")
    if config.cluster.share_devices:
        raise ValueError(
            f"{ELASTIC} has workers that do not give their devices back, which "
            "cluster.share_devices = true asks for. Set one of the two otherwise."
        )
    if config.algorithm.chooses_tokens:
        what = (
            f"algorithm.loss.kind = {loss}"
            if config.algorithm.entropy.top_share == 1
            else f"algorithm.entropy.top_share = {config.algorithm.entropy.top_share:g}"
        )
        raise ValueError(
            f"{what} chooses tokens over a whole mini-batch, of which a worker of {ELASTIC} has one "
            "unit. Set train.engine = fsdp, or another one."
        )
    for role in config.frozen_roles:
        if (pool := roles.pool_of(role)) in (roles.actor, roles.pool_of("aggregator")):
            raise ValueError(
                f"The {role} needs all workers of its pool, and those of cluster.pools.{pool} come "
                f"and go with {ELASTIC}. Set cluster.roles.{role} to a pool of its own."
            )


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
        (config.has_critic, "a critic", "Run it with refrain grpo"),
        (
            config.algorithm.needs_baselines,
            "greedy baselines",
            "Set algorithm.advantage.kind = grpo",
        ),
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
