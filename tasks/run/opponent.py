"""Which version plays against the policy (episodes.opponent.version), found before a run begins."""

from __future__ import annotations

from configs.episodes import OpponentConfig
from configs.grpo import GRPOConfig
from configs.model import RandomModel
from configs.overrides import ConfigError
from engines.models.facts import ModelFacts, model_facts
from storage.objects.errors import ObjectMissing, StoreError
from storage.objects.store import Store
from storage.runs.forks import NoSuchOrigin, begin_at
from storage.runs.opponents import Opponent, opponent_of
from storage.runs.run_store import Origin, RunStore
from storage.runs.weights import open_chain
from tasks.run.continue_from import place_of
from tasks.run.recorded_flow import settings_of

SETTING = "episodes.opponent.version"
START = "start"


def frozen_version(config: GRPOConfig, store: Store, fork: Origin | None) -> Opponent | None:
    """The version of another run that plays against a new run; None: its own first one, or none.

    fork: where the run begins, if it is a fork: unless it names another, it has its parent's
    opponent. Raises ConfigError where there is no such version, or it does not fit the model.
    """
    settings = config.opponent
    if settings is None:
        return None
    if fork is not None and (found := _inherited(RunStore(store, fork.run), settings)) is not None:
        return found
    if settings.version == START:
        return None
    try:
        owner, step = place_of(store, config.tracking, settings.version, SETTING)
        origin = begin_at(owner, step, fork=False, trainer_state=False, cursor=False)
    except (NoSuchOrigin, StoreError) as error:
        raise ConfigError(f"{SETTING} = {settings.version}: {error}") from error
    found = Opponent.of(origin.weights)
    _check_fits(config, settings_of(RunStore(store, origin.run)), found)
    return found


def _inherited(parent: RunStore, settings: OpponentConfig) -> Opponent | None:
    """The opponent of a fork's parent; None where the fork names another one."""
    before = settings_of(parent).opponent
    if before is None or before.version != settings.version:
        return None
    found = opponent_of(parent)
    try:
        open_chain(parent.store, found.weights)
    except ObjectMissing as error:
        raise ConfigError(
            f"The opponent of {parent.run}, {found}, is no longer in the store ({error}). Set "
            f"{SETTING} to another version."
        ) from error
    return found


def _check_fits(config: GRPOConfig, other: GRPOConfig, opponent: Opponent) -> None:
    """ConfigError where the sizes of the opponent's model are not those of the policy's."""
    theirs, ours = (model_facts(settings.model) for settings in (other, config))
    if theirs is None or ours is None:
        return  # files that are not here yet; engines compare each tensor before they load it
    if _sizes(theirs) != _sizes(ours):
        raise ConfigError(
            f"{SETTING} = {opponent} does not fit the model: it has {_sizes(theirs)}, the "
            f"policy has {_sizes(ours)}. Name a version of "
            f"{'such a model' if isinstance(config.model, RandomModel) else config.model.path}."
        )


def _sizes(facts: ModelFacts) -> str:
    shape = facts.shape
    if shape is None:
        return (
            f"{facts.layers} layers with {facts.heads} heads of {facts.head_size}, and {facts.rows} "
            "tokens"
        )
    return (
        f"{shape.layers} layers of width {shape.hidden} and {shape.intermediate} with "
        f"{shape.heads} heads, and {shape.vocabulary} tokens"
    )
