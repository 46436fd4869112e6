"""Bounds of the quarantine that can be measured."""

from collections.abc import Iterable

from configs.data import QuarantineConfig
from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _quarantine(config: RunConfig) -> Iterable[QuarantineConfig]:
    return [] if config.data.quarantine is None else [config.data.quarantine]


QUARANTINE: tuple[Rule[RunConfig], ...] = (
    of_each(
        _quarantine,
        needs=lambda config, bounds: bounds.seconds is None or config.episodes is not None,
        says=lambda config, bounds: (
            f"data.quarantine.seconds = {bounds.seconds:g} is about the environments of "
            "episodes, and episodes = null has none. Set data.quarantine.tokens instead."
        ),
    ),
    of_each(
        _quarantine,
        needs=lambda config, bounds: bounds.no_variance is None or config.smallest_group[1] > 1,
        says=lambda config, bounds: (
            f"data.quarantine.no_variance = {bounds.no_variance} compares the samples of a "
            f"prompt, and {config.smallest_group[0]} = 1 has one, which never varies. Set "
            f"{config.smallest_group[0]} higher, or data.quarantine.no_variance = null."
        ),
    ),
)
