"""All roles of engines, in the order in which they start where that is free."""

from __future__ import annotations

from typing import Any

from configs.grpo import GRPOConfig
from engines.data.contract import PromptMaker
from engines.workers.pool import EnginePool
from tasks.run.roles.environments import ENVIRONMENT
from tasks.run.roles.progress import ENCODER, PROGRESS
from tasks.run.roles.reward_models import REWARD_MODEL
from tasks.run.roles.role import ByRole, EngineRole
from tasks.run.roles.sampling import EVALUATION, OPPONENT, ROLLOUT
from tasks.run.roles.scoring import PLANNER, SCORER
from tasks.run.roles.teachers import SERVICES, TEACHERS
from tasks.run.roles.training import ACTOR, CRITIC, REF
from tasks.run.roles.trees import TREES

ROLES: tuple[EngineRole[Any], ...] = (
    *(SCORER, PLANNER, ROLLOUT, OPPONENT, TEACHERS, REF, CRITIC, ACTOR, ENVIRONMENT),
    *(REWARD_MODEL, EVALUATION, ENCODER, PROGRESS, TREES, SERVICES),
)


def roles_of(config: GRPOConfig) -> list[EngineRole[Any]]:
    """The roles that a run of these settings has."""
    return [role for role in ROLES if role.needed(config)]


def variables_of(config: GRPOConfig) -> dict[str, dict[str, str]]:
    """Pool -> environment variables of its workers, for the engines that they will hold."""
    variables: dict[str, dict[str, str]] = {}
    for role in ROLES:
        for pool, own in role.variables(config).items():
            variables[pool] = {**variables.get(pool, {}), **own}
    return variables


def prompters(engines: ByRole) -> EnginePool[PromptMaker]:
    """The workers that make prompts of rows."""
    environments, scorers = engines.get(ENVIRONMENT), engines[SCORER]
    return scorers if environments is None else environments
