"""Runs that go on from earlier ones."""

from configs.rules.rule import Rule
from configs.run import RunConfig

RETRAINING: tuple[Rule[RunConfig], ...] = (
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
