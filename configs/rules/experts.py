"""Mixtures of experts: settings of their routers."""

from configs.model import PretrainedModel
from configs.rules.rule import Rule, where
from configs.run import RunConfig

EXPERTS: tuple[Rule[RunConfig], ...] = where(
    lambda config: any(config.train.of_experts),
    Rule[RunConfig](
        needs=lambda config: isinstance(config.model, PretrainedModel),
        says=lambda config: (
            f"{config.train.of_experts[0]} is for mixtures of experts, and model.kind = "
            f"{config.model.kind} makes a model without any. Set {config.train.of_experts[1]}."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: config.train.sequence_parallel == 1 and not config.train.compile,
        says=lambda config: (
            f"{config.train.of_experts[0]} needs layers that are not compiled, and whole samples on "
            "each rank. Set train.sequence_parallel = 1 and train.compile = false."
        ),
    ),
)
