"""The rules of train.engine = elastic: what independent workers and their aggregator can train."""

from configs.run import RunConfig

ELASTIC = "train.engine = elastic"


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
