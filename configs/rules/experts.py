"""Mixtures of experts: settings of their routers, and of the ranks that hold experts."""

from collections.abc import Callable

from configs.model import PretrainedModel
from configs.rules.rule import Rule, where
from configs.run import RunConfig

BIASES = "train.router_bias_update_rate"
SPREAD = "train.expert_parallel"


def for_mixtures(setting: Callable[[RunConfig], tuple[str, str]]) -> Rule[RunConfig]:
    """A rule of what only mixtures of experts have a use for.

    setting: it, and what to set instead; empty where it is not asked for.
    """
    return Rule[RunConfig](
        needs=lambda config: not setting(config)[0] or isinstance(config.model, PretrainedModel),
        says=lambda config: (
            f"{setting(config)[0]} is for mixtures of experts, and model.kind = {config.model.kind} "
            f"makes a model without any. Set {setting(config)[1]}."
        ),
    )


_ROUTERS: tuple[Rule[RunConfig], ...] = where(
    lambda config: any(config.train.of_experts),
    Rule[RunConfig](
        needs=lambda config: (
            not config.train.router_bias_update_rate
            or (config.lora is None and config.train.engine == "fsdp")
        ),
        says=lambda config: (
            f"{BIASES} = {config.train.router_bias_update_rate:g} changes the model itself at each "
            "optimizer step, which neither adapters nor elastic workers do. Set lora = null and "
            f"train.engine = fsdp, or {BIASES} = 0."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: not config.train.router_replay or config.train.engine == "fsdp",
        says=lambda config: (
            "train.router_replay = true, and elastic workers do not replay routing. Set train.engine "
            "= fsdp, or train.router_replay = false."
        ),
    ),
    for_mixtures(lambda config: config.train.of_experts),
    Rule[RunConfig](
        needs=lambda config: config.train.sequence_parallel == 1 and not config.train.compile,
        says=lambda config: (
            f"{config.train.of_experts[0]} needs layers that are not compiled, and whole samples on "
            "each rank. Set train.sequence_parallel = 1 and train.compile = false."
        ),
    ),
)

_SPREAD: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.train.expert_parallel > 1,
    for_mixtures(lambda config: (f"{SPREAD} = {config.train.expert_parallel}", f"{SPREAD} = 1")),
    Rule[RunConfig](
        needs=lambda config: config.lora is None and not config.train.compile,
        says=lambda config: (
            f"{SPREAD} = {config.train.expert_parallel} needs layers that are not compiled and have "
            f"no adapters. Set lora = null and train.compile = false, or {SPREAD} = 1."
        ),
    ),
)

EXPERTS = _ROUTERS + _SPREAD
