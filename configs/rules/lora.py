"""Adapters, and how versions of them are stored."""

from configs.model import PretrainedModel
from configs.rules.rule import Rule
from configs.run import RunConfig

LORA: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: config.lora is None or config.store.whole_every <= 1,
        says=lambda config: (
            f"store.whole_every = {config.store.whole_every} stores versions as differences, and "
            "with lora a version is a small adapter already. Set store.whole_every = 1."
        ),
    ),
    Rule(
        needs=lambda config: (
            config.lora is None
            or not config.lora.target_parameters
            or isinstance(config.model, PretrainedModel)
        ),
        says=lambda config: (
            "lora.target_parameters is for mixtures of experts, and model.kind = "
            f"{config.model.kind} makes a model without any. Set lora.target_parameters = []."
        ),
    ),
)
