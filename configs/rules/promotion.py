"""The suite by which the last version is promoted."""

from collections.abc import Iterable

from configs.evaluation import EvaluationConfig
from configs.promotion import PromotionConfig
from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _promotion(config: RunConfig) -> Iterable[PromotionConfig]:
    return [] if config.promotion is None else [config.promotion]


def _judged(config: RunConfig) -> Iterable[tuple[PromotionConfig, EvaluationConfig]]:
    if config.promotion is None or config.evaluation is None:
        return []
    return [(config.promotion, config.evaluation)]


PROMOTION: tuple[Rule[RunConfig], ...] = (
    of_each(
        _promotion,
        needs=lambda config, promotion: config.evaluation is not None,
        says=lambda config, promotion: (
            f"promotion.alias = {promotion.alias} needs an evaluation to go by. "
            "Set evaluation.suites, or evaluation.source to held-out rows."
        ),
    ),
    of_each(
        _judged,
        needs=lambda config, both: both[0].suite is not None or len(both[1].suites) == 1,
        says=lambda config, both: (
            f"promotion goes by one suite, and evaluation.suites has {', '.join(both[1].suites)}. "
            "Set promotion.suite to one of them."
        ),
    ),
    of_each(
        _judged,
        needs=lambda config, both: both[0].suite is None or both[0].suite in both[1].suites,
        says=lambda config, both: (
            f"promotion.suite = {both[0].suite} is no suite of the run. Set it to one of "
            f"{', '.join(both[1].suites)}."
        ),
    ),
    of_each(
        _judged,
        needs=lambda config, both: both[1].at_end,
        says=lambda config, both: (
            "promotion judges the last version, and evaluation.at_end = false does not test it. "
            "Set evaluation.at_end = true, or promotion = null."
        ),
    ),
)
