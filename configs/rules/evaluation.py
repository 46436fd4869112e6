"""Suites that test a run."""

from collections.abc import Iterable

from configs.evaluation import EvaluationConfig
from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _evaluation(config: RunConfig) -> Iterable[EvaluationConfig]:
    return [] if config.evaluation is None else [config.evaluation]


def _roles_beside_evaluations(config: RunConfig) -> Iterable[str]:
    """Roles with an engine on the pool that evaluations have of their own."""
    pool, pool_of = config.cluster.roles.evaluation, config.cluster.roles.pool_of
    roles = config.engine_roles if config.evaluates_aside else []
    return [role for role in roles if pool_of(role) == pool]


# Other rows than those trained on, and engines that hold one version meanwhile.
EVALUATION: tuple[Rule[RunConfig], ...] = (
    of_each(
        lambda config: config.suites.items(),
        needs=lambda config, suite: suite[1].source != config.data.source,
        says=lambda config, suite: (
            f"evaluation.suites.{suite[0]}.source is the same as data.source, so the test would "
            "be on rows that are trained on. Set it to other rows."
        ),
    ),
    of_each(
        _evaluation,
        needs=lambda config, evaluation: (
            evaluation.every is None or config.max_staleness == 0 or config.evaluates_aside
        ),
        says=lambda config, evaluation: (
            f"evaluation.every = {evaluation.every} tests versions between steps, and with "
            f"max_staleness = {config.max_staleness} steps overlap, so the engines of rollout "
            "never hold one version. Set cluster.roles.evaluation to a pool of its own, or "
            "evaluation.every = null."
        ),
    ),
    of_each(
        _roles_beside_evaluations,
        needs=lambda config, role: False,
        says=lambda config, role: (
            f"cluster.roles.evaluation = {config.cluster.roles.evaluation} is the pool of the role "
            f"{role} too. Set it to a pool that no other engine has, or to null: evaluations then "
            "come between steps."
        ),
    ),
)
