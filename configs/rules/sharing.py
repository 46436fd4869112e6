"""What cluster.share_devices goes with: what can take turns, and what would wait for ever."""

from configs.rules.rule import Rule, where
from configs.run import RunConfig


def _pools(config: RunConfig) -> list[str]:
    """The pool of each role whose engines take turns."""
    return [config.cluster.roles.pool_of(role) for role in config.engine_roles]


def _rollout_has_its_own(config: RunConfig) -> bool:
    of = config.cluster.roles.pool_of
    return all(of(role) != of("rollout") for role in config.engine_roles if role != "rollout")


def _nothing_is_shared(config: RunConfig) -> str:
    of = config.cluster.roles.pool_of
    pools = ", ".join(f"{role} on {of(role)}" for role in config.engine_roles)
    return (
        f"cluster.share_devices = true, but no two roles share a pool ({pools}). Set "
        f"cluster.roles.rollout = {of('actor')}, or cluster.share_devices = false."
    )


SHARING: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.cluster.share_devices,
    Rule(
        needs=lambda config: config.opponent is None,
        says=lambda config: (
            "cluster.share_devices = true, but the engines of episodes.opponent do not give "
            "their devices back. Set cluster.share_devices = false, or episodes.opponent = "
            "null."
        ),
    ),
    Rule(
        needs=lambda config: len({*_pools(config)}) < len(config.engine_roles),
        says=_nothing_is_shared,
    ),
    Rule(
        needs=lambda config: config.max_staleness == 0 or _rollout_has_its_own(config),
        says=lambda config: (
            f"max_staleness = {config.max_staleness} samples while another step trains, and with "
            "cluster.share_devices = true only one of the two has the devices of pool "
            f"{config.cluster.roles.rollout}. Set max_staleness = 0, or cluster.roles.rollout to a "
            "pool of its own."
        ),
    ),
    Rule(
        needs=lambda config: (
            not config.rewards.on_engines
            or config.cluster.roles.pool_of("reward_model") not in _pools(config)
        ),
        says=lambda config: (
            "cluster.share_devices = true, but reward models and judges do not give the "
            f"devices of pool {config.cluster.roles.pool_of('reward_model')} back. Set "
            "cluster.roles.reward_model to another pool."
        ),
    ),
)
