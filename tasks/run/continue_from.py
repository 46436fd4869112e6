"""Where a new run begins, if its settings say continue_from: weights, trainer state, rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.storage import TrackingConfig
from storage.objects.errors import ObjectMissing, StoreError
from storage.objects.store import Store
from storage.prompts.cursor import Cursor
from storage.prompts.datasets import first_place, open_source
from storage.runs.commit_log import read_commit
from storage.runs.forks import NoSuchOrigin, begin_at
from storage.runs.live import goes_on_as
from storage.runs.run_store import Origin, RunStore
from storage.runs.seen_rows import seen_at, seen_before, unseen
from storage.runs.snapshots import base_of
from storage.tracking.registry import NotRegistered, Registry

if TYPE_CHECKING:
    from storage.prompts.source import PromptSource

from tasks.run.forking import check_state_fits, parent_config

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
    seen = seen_at(owner, reached, source)
    if seen is None:
        return origin, np.empty(0, np.uint64)
    if config.continue_data == "unseen" and not unseen(source, seen):
        raise NothingNew(
            f"Nothing new to train on: all {len(source)} rows of {source.name} were seen by {origin} "
            "or the runs before it."
        )
    return origin, seen


def first_cursor(
    store: Store,
    config: GRPOConfig,
    source: PromptSource,
    origin: Origin | None,
    seen: np.ndarray,
) -> Cursor:
    """Where a run draws first, by its origin and the digests of the rows seen before."""
    if origin is not None and origin.cursor:
        before = read_commit(RunStore(store, origin.run), origin.step)
        return Cursor.from_json(before.cursor)
    first = origin is not None and not origin.fork and config.continue_data == "unseen"
    new = unseen(source, seen) if first and len(seen) else []
    return first_place(config.data, source, new)


def fresh_rows(cursor: Cursor, source: PromptSource, seen: np.ndarray) -> list[int]:
    """The unseen rows with which a run began that has some first; none in later epochs."""
    return unseen(source, seen) if cursor.in_unseen else []


def place_of(
    store: Store, tracking: TrackingConfig, named: str, setting: str
) -> tuple[RunStore, int | None]:
    """The run that models:/NAME@ALIAS, RUN or RUN@STEP names, and the step; None for its last.

    The last of a run that a guard rolled back is that of the run which goes on with it. setting: that
    names it. Raises ConfigError.
    """
    if not named.startswith(REGISTERED):
        name, _, step = named.partition("@")
        run = RunStore(store, name)
        return (run, int(step)) if step else (goes_on_as(run), None)
    model, _, alias = named.removeprefix(REGISTERED).partition("@")
    try:
        found = Registry(tracking).by_alias(model, alias)
    except NotRegistered as error:
        raise ConfigError(f"{setting}: {error}") from error
    if found is None:
        raise ConfigError(
            f"{setting} = {named}: no version of model {model} has the alias {alias} at "
            f"{tracking.uri}. Run once without {setting} and with promotion.alias = {alias}, "
            "or set another alias."
        )
    if found.store_uri != store.uri:
        raise ConfigError(
            f"{setting} = {named} is in the store {found.store_uri}, and store.uri = {store.uri}. "
            "Set store.uri to the former."
        )
    return RunStore(store, found.run), found.step


def _check_snapshot(parent: RunStore, origin: Origin, role: str) -> None:
    base = base_of(RunStore(parent.store, origin.run, role), origin.step)
    if base is None or base.version != origin.step:
        whose = "trainer" if role == "actor" else role
        raise ObjectMissing(
            f"the {whose}'s state of {origin} is not stored as a snapshot. Name a step with one, "
            "such as a run's last, or set continue_state = weights."
        )
