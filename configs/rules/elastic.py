"""What elastic workers cannot train."""

from collections.abc import Iterable

from configs.algorithm.algorithm import AlgorithmConfig
from configs.cluster import Role
from configs.rules.rule import Rule, of_each, where
from configs.run import RunConfig

ENGINE = "train.engine = elastic"


def _choice_of_tokens(algorithm: AlgorithmConfig) -> str:
    """The setting by which tokens are chosen over a mini-batch."""
    if algorithm.entropy.top_share == 1:
        return f"algorithm.loss.kind = {algorithm.loss.kind}"
    return f"algorithm.entropy.top_share = {algorithm.entropy.top_share:g}"


def _frozen_roles(config: RunConfig) -> Iterable[Role]:
    return config.frozen_roles


ELASTIC: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.train.engine == "elastic",
    Rule(
        needs=lambda config: config.lora is None,
        says=lambda config: (
            f"{ENGINE} trains no adapters. Set train.engine = fsdp, or lora = null."
        ),
    ),
    Rule(
        needs=lambda config: not config.cluster.share_devices,
        says=lambda config: (
            f"{ENGINE} has workers that do not give their devices back, which "
            "cluster.share_devices = true asks for. Set one of the two otherwise."
        ),
    ),
    Rule(
        needs=lambda config: not config.algorithm.chooses_tokens,
        says=lambda config: (
            f"{_choice_of_tokens(config.algorithm)} chooses tokens over a whole mini-batch, of which "
            f"a worker of {ENGINE} has one unit. Set train.engine = fsdp, or another one."
        ),
    ),
    of_each(
        _frozen_roles,
        needs=lambda config, role: (
            config.cluster.roles.pool_of(role)
            not in (config.cluster.roles.actor, config.cluster.roles.pool_of("aggregator"))
        ),
        says=lambda config, role: (
            f"The {role} needs all workers of its pool, and those of cluster.pools."
            f"{config.cluster.roles.pool_of(role)} come and go with {ENGINE}. "
            f"Set cluster.roles.{role} to a pool of its own."
        ),
    ),
)
