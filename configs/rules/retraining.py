"""Runs that go on from earlier ones and take over from them."""

from collections.abc import Iterable

from configs.retraining import PromotionConfig
from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _promotion(config: RunConfig) -> Iterable[PromotionConfig]:
    return [] if config.promotion is None else [config.promotion]


RETRAINING: tuple[Rule[RunConfig], ...] = (
    of_each(
        _promotion,
        needs=lambda config, promotion: config.evaluation is not None,
        says=lambda config, promotion: (
            f"promotion.alias = {promotion.alias} needs an evaluation to go by. "
            "Set evaluation.suites, or evaluation.source to held-out rows."
        ),
    ),
    Rule(
        needs=lambda config: (
            config.continue_from is None
            or config.continue_state != "trainer"
            or config.train.schedule == "constant"
        ),
        says=lambda config: (
            f"continue_state = trainer takes over a train.schedule = {config.train.schedule} "
            "that has come to its end. Set train.schedule = constant, or "
            "continue_state = weights."
        ),
    ),
)
