"""What the engines that sample are asked for."""

from configs.rules.rule import Rule, where
from configs.run import RunConfig


def _speculates(config: RunConfig) -> bool:
    rollout = config.rollout
    return rollout.speculative is not None or "speculative_config" in rollout.engine_args


SPECULATION: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: config.rollout.speculative is None or config.rollout.engine == "vllm",
        says=lambda config: (
            f"rollout.speculative is vLLM's, and rollout.engine = {config.rollout.engine}. Set "
            "rollout.speculative = null, or rollout.engine = vllm."
        ),
    ),
    Rule(
        needs=lambda config: (
            config.rollout.speculative is None
            or "speculative_config" not in config.rollout.engine_args
        ),
        says=lambda config: (
            "rollout.speculative and rollout.engine_args.speculative_config are two ways to propose "
            "tokens, and vLLM takes one. Remove one of them."
        ),
    ),
    *where(
        _speculates,
        Rule(
            needs=lambda config: config.rollout.min_p == 0,
            says=lambda config: (
                f"rollout.min_p = {config.rollout.min_p:g}, and vLLM takes no min_p where tokens are "
                "proposed. Set rollout.min_p = 0, or rollout.speculative = null."
            ),
            new_runs_only=True,
        ),
        Rule(
            needs=lambda config: (
                not config.rollout.sampling_mask and not config.train.router_replay
            ),
            says=lambda config: (
                "rollout.sampling_mask and train.router_replay want what vLLM knows of each token, "
                "and where tokens are proposed that was not tried. Set both to false, or "
                "rollout.speculative = null."
            ),
            new_runs_only=True,
        ),
    ),
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
    *SPECULATION,
)
