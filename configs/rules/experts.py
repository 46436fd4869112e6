"""Mixtures of experts: what balances their load."""

from configs.model import PretrainedModel
from configs.rules.rule import Rule, where
from configs.run import RunConfig

COEFFICIENT = "train.router_aux_loss_coef"

EXPERTS: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.train.router_aux_loss_coef > 0,
    Rule[RunConfig](
        needs=lambda config: isinstance(config.model, PretrainedModel),
        says=lambda config: (
            f"model.kind = {config.model.kind} makes a model without experts, and {COEFFICIENT} "
            f"balances their load. Set {COEFFICIENT} = 0."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: config.train.sequence_parallel == 1 and not config.train.compile,
        says=lambda config: (
            f"{COEFFICIENT} balances the experts' load by whole samples and layers that are not "
            "compiled. Set train.sequence_parallel = 1 and train.compile = false."
        ),
    ),
)
