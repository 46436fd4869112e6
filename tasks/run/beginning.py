"""Where a new run begins, at a step of another one (a fork, continue_from), and its opponent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from configs.episodes import OpponentConfig
from configs.grpo import GRPOConfig
from configs.model import RandomModel
from configs.overrides import ConfigError
from configs.storage import TrackingConfig
from engines.models.facts import ModelFacts, model_facts
from storage.objects.errors import ObjectMissing, StoreError
from storage.objects.store import Store
from storage.prompts.cursor import Cursor
from storage.prompts.datasets import first_place, open_source
from storage.runs.commit_log import read_commit
from storage.runs.forks import NoSuchOrigin, begin_at
from storage.runs.live import goes_on_as
from storage.runs.opponents import Opponent, opponent_of
from storage.runs.run_store import Origin, RunStore, committer, origin_of
from storage.runs.seen_rows import seen_at, seen_before, unseen
from storage.runs.snapshots import base_of
from storage.runs.weights import open_chain
from storage.tracking.registry import NotRegistered, Registry
from tasks.run.run_record import check_same_flow, parent_config, settings_of

if TYPE_CHECKING:
    from storage.prompts.source import PromptSource


def split(fork: str) -> tuple[str, int | None]:
    """RUN@STEP as name and step; the step is None for RUN alone, which means its last."""
    name, at, step = fork.partition("@")
    if not name or (at and not step.isdigit()):
        raise ConfigError(
            f"--fork {fork} names no step. Write RUN@STEP, such as {name or 'RUN'}@20."
        )
    return name, int(step) if at else None


def origin_of_fork(config: GRPOConfig, fork: str, flow: str) -> Origin:
    """The origin of a run that `flow` begins at RUN@STEP with `config`; ConfigError if it cannot."""
    name, step = split(fork)
    parent = RunStore(Store(config.store.uri, config.store.options), name)
    if parent.read_run() is None:
        raise ConfigError(
            f"There is no run {name} in {parent.store.uri}. A fork shares its parent's objects, so "
            "it needs the same store: set store.uri."
        )
    check_same_flow(parent, flow, config.store, fork)
    try:
        origin = begin_at(parent, step, fork=True)
    except NoSuchOrigin as error:
        raise ConfigError(str(error)) from error
    before = parent_config(parent, origin)
    if before.model != config.model:
        raise ConfigError(
            f"{origin} was trained from another model, whose weights and optimizer state do not fit "
            "the one given. A fork keeps its parent's model; start a new run to change it."
        )
    check_state_fits(config, before, str(origin))
    if config.steps <= origin.at:
        raise ConfigError(
            f"steps = {config.steps}, and a fork of {origin} begins after step {origin.at}. "
            f"Set steps to {origin.at + 1} or more."
        )
    goes_on = data_go_on(config, before)
    if goes_on and config.rollout.sampling_mask and not before.rollout.sampling_mask:
        _check_no_answer_is_begun(parent, origin)
    update = {
        "cursor": goes_on,
        "first_group": first_group(config, parent, origin),
    }
    return origin.model_copy(update=update)


def _check_no_answer_is_begun(parent: RunStore, origin: Origin) -> None:
    """ConfigError where a step hands answers on of whose tokens the words were not kept."""
    owner, step = committer(parent, origin.step)
    if any(group.begun for group in read_commit(owner, step).carried):
        raise ConfigError(
            f"rollout.sampling_mask = true, and {origin} hands on answers that were begun without "
            "it. Set it to false, or fork a step that hands on none."
        )


def check_state_fits(config: GRPOConfig, before: GRPOConfig, origin: str) -> None:
    """ConfigError where a trainer's state is to be taken over by what has another kind of it."""
    anew = (
        f"or begin with the weights alone: continue_from = {origin} with continue_state = weights."
    )
    was, is_ = (
        "null" if lora is None else str(lora.model_dump(mode="json", exclude={"serving"}))
        for lora in (before.lora, config.lora)
    )
    if was != is_:
        raise ConfigError(
            f"The trainer state of {origin} is of lora = {was}, and lora = {is_} does not fit it. "
            f"Set lora to the former, {anew}"
        )
    formats = [settings.train.optimizer_dtype for settings in (before, config)]
    if formats[0] != formats[1] and "8bit" in formats:
        raise ConfigError(
            f"The trainer state of {origin} is of train.optimizer_dtype = {formats[0]}, and "
            f"train.optimizer_dtype = {formats[1]} has other moments. Set it to the former, {anew}"
        )


def first_group(config: GRPOConfig, parent: RunStore, origin: Origin) -> int:
    """The first group such that neither group nor sample numbers come twice."""
    groups = groups_before(parent, origin)
    before = parent_config(parent, origin).samples_per_prompt
    return max(groups, math.ceil(groups * before / config.samples_per_prompt))


def groups_before(parent: RunStore, origin: Origin) -> int:
    """Groups that the parent numbered through the origin's step."""
    owner, step = committer(parent, origin.step)
    above = origin_of(owner)
    start, first = (0, 0) if above is None else (above.at, above.first_group)
    return first + (step - start) * settings_of(owner).groups_numbered


def data_go_on(config: GRPOConfig, before: GRPOConfig) -> bool:
    """Whether both settings draw the same rows in the same order."""
    orders = [
        first_place(settings.data, open_source(settings.data.source))
        for settings in (config, before)
    ]
    return orders[0] == orders[1]


REGISTERED = "models:/"


class NothingNew(Exception):
    """Every row has been seen by the run that this one would go on from; there is nothing to do."""


def beginning(config: GRPOConfig) -> tuple[Origin, np.ndarray]:
    """What `config.continue_from` means: the origin, and digests of the rows drawn until there.

    None of them where it is not known what was drawn. Raises ConfigError if there is no such place,
    and NothingNew.
    """
    store = Store(config.store.uri, config.store.options)
    assert config.continue_from is not None
    parent, step = place_of(store, config.tracking, config.continue_from, "continue_from")
    try:
        origin = begin_at(
            parent,
            step,
            fork=False,
            trainer_state=config.continue_state == "trainer",
            cursor=config.continue_data == "cursor",
        )
        if origin.trainer_state:
            check_state_fits(config, parent_config(parent, origin), str(origin))
            for role in config.trained_roles:
                _check_snapshot(parent, origin, role)
    except (NoSuchOrigin, StoreError) as error:
        raise ConfigError(f"continue_from = {config.continue_from}: {error}") from error
    owner = RunStore(store, origin.run)
    source = open_source(config.data.source)
    reached = Cursor.from_json(read_commit(owner, origin.step).cursor)
    if config.continue_data == "cursor":
        now = source.as_recorded(reached.digest)
        if (len(now), now.digest) != (reached.size, reached.digest):
            raise ConfigError(
                f"continue_data = cursor, but the data are no longer those of {origin}: "
                f"{reached.size} rows then, {len(source)} rows of another content now. "
                "Set continue_data = unseen."
            )
        return origin, seen_before(owner)
    digests = seen_at(owner, reached, source)
    if digests is None:
        return origin, np.empty(0, np.uint64)
    if config.continue_data == "unseen" and not unseen(source, digests):
        raise NothingNew(
            f"Nothing new to train on: all {len(source)} rows of {source.name} were seen by {origin} "
            "or the runs before it."
        )
    return origin, digests


def first_cursor(
    store: Store,
    config: GRPOConfig,
    source: PromptSource,
    origin: Origin | None,
    digests: np.ndarray,
) -> Cursor:
    """Where a run draws first, by its origin and the digests of the rows seen before."""
    if origin is not None and origin.cursor:
        before = read_commit(RunStore(store, origin.run), origin.step)
        return Cursor.from_json(before.cursor)
    first = origin is not None and not origin.fork and config.continue_data == "unseen"
    new = unseen(source, digests) if first and len(digests) else []
    return first_place(config.data, source, new)


def fresh_rows(cursor: Cursor, source: PromptSource, digests: np.ndarray) -> list[int]:
    """The unseen rows with which a run began that has some first; none in later epochs."""
    return unseen(source, digests) if cursor.in_unseen else []


def place_of(
    store: Store, tracking: TrackingConfig, address: str, setting: str
) -> tuple[RunStore, int | None]:
    """The run that models:/NAME@ALIAS, RUN or RUN@STEP names, and the step; None for its last.

    The last of a run that a guard rolled back is that of the run which goes on with it. setting: that
    names it. Raises ConfigError.
    """
    if not address.startswith(REGISTERED):
        name, _, step = address.partition("@")
        run = RunStore(store, name)
        return (run, int(step)) if step else (goes_on_as(run), None)
    model, _, alias = address.removeprefix(REGISTERED).partition("@")
    try:
        version = Registry(tracking).by_alias(model, alias)
    except NotRegistered as error:
        raise ConfigError(f"{setting}: {error}") from error
    if version is None:
        raise ConfigError(
            f"{setting} = {address}: no version of model {model} has the alias {alias} at "
            f"{tracking.uri}. Run once without {setting} and with promotion.alias = {alias}, "
            "or set another alias."
        )
    if version.store_uri != store.uri:
        raise ConfigError(
            f"{setting} = {address} is in the store {version.store_uri}, and store.uri = "
            f"{store.uri}. Set store.uri to the former."
        )
    return RunStore(store, version.run), version.step


def _check_snapshot(parent: RunStore, origin: Origin, role: str) -> None:
    base = base_of(RunStore(parent.store, origin.run, role), origin.step)
    if base is None or base.version != origin.step:
        whose = "trainer" if role == "actor" else role
        raise ObjectMissing(
            f"the {whose}'s state of {origin} is not stored as a snapshot. Name a step with one, "
            "such as a run's last, or set continue_state = weights."
        )


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
    if (
        fork is not None
        and (opponent := _parents_opponent(RunStore(store, fork.run), settings)) is not None
    ):
        return opponent
    if settings.version == START:
        return None
    try:
        owner, step = place_of(store, config.tracking, settings.version, SETTING)
        origin = begin_at(owner, step, fork=False, trainer_state=False, cursor=False)
    except (NoSuchOrigin, StoreError) as error:
        raise ConfigError(f"{SETTING} = {settings.version}: {error}") from error
    opponent = Opponent.of(origin.weights)
    _check_fits(config, settings_of(RunStore(store, origin.run)), opponent)
    return opponent


def _parents_opponent(parent: RunStore, settings: OpponentConfig) -> Opponent | None:
    """The opponent of a fork's parent; None where the fork names another one."""
    before = settings_of(parent).opponent
    if before is None or before.version != settings.version:
        return None
    opponent = opponent_of(parent)
    try:
        open_chain(parent.store, opponent.weights)
    except ObjectMissing as error:
        raise ConfigError(
            f"The opponent of {parent.run}, {opponent}, is no longer in the store ({error}). Set "
            f"{SETTING} to another version."
        ) from error
    return opponent


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
