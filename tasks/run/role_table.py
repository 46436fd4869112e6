"""The roles of engines: those that any run may have, and those of its features."""

from __future__ import annotations

from typing import Any

from configs.grpo import GRPOConfig
from engines.data.contract import PromptMaker
from engines.workers.pool import EnginePool
from tasks.run.features import features_of
from tasks.run.roles.environments import ENVIRONMENT
from tasks.run.roles.reward_models import REWARD_MODEL
from tasks.run.roles.role import ByRole, EngineRole
from tasks.run.roles.sampling import EVALUATION, OPPONENT, ROLLOUT
from tasks.run.roles.scoring import PLANNER, SCORER
from tasks.run.roles.training import ACTOR, REF

ROLES: tuple[EngineRole[Any], ...] = (
    *(SCORER, PLANNER, ROLLOUT, OPPONENT, REF, ACTOR, ENVIRONMENT),
    *(REWARD_MODEL, EVALUATION),
)


def roles_of(config: GRPOConfig) -> list[EngineRole[Any]]:
    """The roles that a run has, in the order in which they start where that is free."""
    return [role for role in _known_roles(config) if role.needed(config)]


def _known_roles(config: GRPOConfig) -> list[EngineRole[Any]]:
    return [*ROLES, *(role for feature in features_of(config) for role in feature.roles)]


def variables_of(config: GRPOConfig) -> dict[str, dict[str, str]]:
    """Pool -> environment variables of its workers, for the engines that they will hold."""
    variables: dict[str, dict[str, str]] = {}
    for role in _known_roles(config):
        for pool, own in role.variables(config).items():
            variables[pool] = {**variables.get(pool, {}), **own}
    return variables


def prompters(engines: ByRole) -> EnginePool[PromptMaker]:
    """The workers that make prompts of rows."""
    environments, scorers = engines.get(ENVIRONMENT), engines[SCORER]
    return scorers if environments is None else environments
