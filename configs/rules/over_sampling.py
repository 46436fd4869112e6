"""Groups that a step does not wait for: handed out one by one, dropped or carried to the next."""

from configs.rules.rule import Rule, where
from configs.run import RunConfig

NO_CARRIED = (
    "is about carried groups, and none are. Set rollout.partial_rollout = carry and "
    "rollout.over_sampling above 1."
)

OVER_SAMPLING: tuple[Rule[RunConfig], ...] = (
    *where(
        lambda config: config.over_samples,
        Rule[RunConfig](
            needs=lambda config: config.rollout.shards == config.prompts_per_step,
            says=lambda config: (
                f"rollout.over_sampling = {config.rollout.over_sampling:g} hands out groups one by "
                f"one, and rollout.shards = {config.rollout.shards} puts several together. "
                f"Set rollout.shards = {config.prompts_per_step}, the number of prompts_per_step."
            ),
        ),
    ),
    Rule(
        needs=lambda config: not config.carries or config.max_staleness > 0,
        says=lambda config: (
            "rollout.partial_rollout = carry trains on groups that an older policy began, and "
            "max_staleness = 0 allows none. Set max_staleness = 1 or more (from 2 on, a step "
            "also samples while another trains), or rollout.partial_rollout = off."
        ),
    ),
    Rule(
        needs=lambda config: config.carries or config.rollout.overdue == "wait",
        says=lambda config: f"rollout.overdue = {config.rollout.overdue} {NO_CARRIED}",
    ),
    Rule(
        needs=lambda config: config.carries or config.rollout.max_carried_steps is None,
        says=lambda config: (
            f"rollout.max_carried_steps = {config.rollout.max_carried_steps} {NO_CARRIED}"
        ),
    ),
)
