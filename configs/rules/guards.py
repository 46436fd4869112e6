"""Guards that are told apart, with metrics that the run has."""

from collections.abc import Iterable

from configs.guards import GuardConfig
from configs.rules.rule import Rule, of_each
from configs.run import RunConfig

KL = "train/kl_ref"


def _guards(config: RunConfig) -> Iterable[GuardConfig]:
    return config.guards


GUARDS: tuple[Rule[RunConfig], ...] = (
    of_each(
        _guards,
        needs=lambda config, guard: (
            [other.label for other in config.guards].count(guard.label) == 1
        ),
        says=lambda config, guard: (
            f"guards: two are called {guard.label}, and commits tell them apart by that. "
            "Give one another name."
        ),
    ),
    of_each(
        _guards,
        needs=lambda config, guard: guard.action != "synchronous" or config.max_staleness > 0,
        says=lambda config, guard: (
            f"guards: the action of {guard.label} is synchronous, which ends the overlap of "
            "steps, and with max_staleness = 0 none do. Set max_staleness higher, or its "
            "action to stop or rollback."
        ),
    ),
    of_each(
        _guards,
        needs=lambda config, guard: (
            "correction" not in guard.metric or len(config.algorithm.correction) > 0
        ),
        says=lambda config, guard: (
            f"guards: the metric of {guard.label}, {guard.metric}, is of "
            "algorithm.correction, which is empty. Set it to "
            "train/rollout_effective_sample_size."
        ),
    ),
    of_each(
        _guards,
        needs=lambda config, guard: guard.metric != KL or config.algorithm.kl.coefficient != 0,
        says=lambda config, guard: (
            f"guards: the metric of {guard.label}, {KL}, is the KL from a reference, "
            "and the recipe has none. Set algorithm.kl.coefficient above 0, or remove the "
            "guard."
        ),
    ),
    of_each(
        _guards,
        needs=lambda config, guard: guard.metric != KL or config.algorithm.kl.placement != "reward",
        says=lambda config, guard: (
            f"guards: the metric of {guard.label}, {KL}, is of a KL in the loss, and "
            "algorithm.kl.placement = reward. Set its metric to advantage/kl_ref."
        ),
    ),
)
