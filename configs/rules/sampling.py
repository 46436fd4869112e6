"""What the engines that sample are asked for."""

from collections.abc import Iterable

from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _sampling_pools(config: RunConfig) -> Iterable[str]:
    return map(config.cluster.roles.pool_of, config.sampling_roles)


# vLLM's build for CPUs was seen to draw wrong tokens.
SPECULATION: Rule[RunConfig] = of_each(
    _sampling_pools,
    needs=lambda config, pool: (
        config.rollout.engine_args.get("speculative_config") is None
        or config.cluster.pools[pool].gpus > 0
    ),
    says=lambda config, pool: (
        f"rollout.engine_args.speculative_config with cluster.pools.{pool}.gpus = 0: on a "
        "CPU vLLM 0.32 draws other tokens with it than without. Remove it."
    ),
    new_runs_only=True,
)

SAMPLING: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: all(config.rollout.stop),
        says=lambda config: (
            f"rollout.stop = {list(config.rollout.stop)} has an empty string, which every text "
            "has, so each completion would end at its first token. Remove it."
        ),
        new_runs_only=True,
    ),
    SPECULATION,
)
