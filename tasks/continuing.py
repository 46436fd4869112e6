"""Where a new run begins, if its settings say continue_from: weights, trainer state, rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from configs.grpo import GRPOConfig
from configs.recipes import ConfigError
from storage.commits import read_commit
from storage.continuing import NoSuchOrigin, begin_at, pin
from storage.cursor import Cursor
from storage.errors import ObjectMissing, StoreError
from storage.origins import FIELD, Origin, origin_of
from storage.registry import NotRegistered, Registry
from storage.runs import RunStore
from storage.seen import seen_at, seen_before, unseen, write_seen
from storage.snapshots import base_of

if TYPE_CHECKING:
    from storage.prompt_source import PromptSource

REGISTERED = "models:/"


class NothingNew(Exception):
    """Every row has been seen by the run that this one would go on from; there is nothing to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """With what a run begins."""

    origin: Origin | None  # None: with the model's own weights
    cursor: Cursor
    seen: np.ndarray | None = None  # digests of rows drawn before; None: not kept

    def write(self, run: RunStore, record: dict[str, object]) -> None:
        """Store run.json with the origin, and tell the parent what is shared with it."""
        if self.origin is None:
            run.write_run(record)
            return
        if self.seen is not None:
            write_seen(run, self.seen)
        pin(run, self.origin)
        run.write_run({**record, FIELD: self.origin.model_dump(mode="json")})


def beginning(files: RunStore, config: GRPOConfig, source: PromptSource) -> Beginning:
    """What `config.continue_from` means; ConfigError if it is not there, NothingNew if it is over."""
    if config.continue_from is None:
        return Beginning(origin=None, cursor=Cursor.start(config.data, source))
    parent, step = _place(files, config)
    try:
        origin = begin_at(
            parent,
            step,
            fork=False,
            trainer_state=config.continue_state == "trainer",
            cursor=config.continue_data == "cursor",
        )
        if origin.trainer_state:
            _check_snapshot(parent, origin)
    except (NoSuchOrigin, StoreError) as error:
        raise ConfigError(f"continue_from = {config.continue_from}: {error}") from error
    owner = RunStore(files.store, origin.run)
    reached = Cursor.from_json(read_commit(owner, origin.step).cursor)
    if config.continue_data == "cursor":
        return _on_from(owner, origin, reached, config, source)
    seen = seen_at(owner, reached, source)
    if config.continue_data == "restart" or seen is None:
        return Beginning(origin=origin, cursor=Cursor.start(config.data, source), seen=seen)
    new = len(unseen(source, seen))
    if not new:
        raise NothingNew(
            f"Nothing new to train on: all {len(source)} rows of {source.name} were seen by {origin} "
            "or the runs before it."
        )
    return Beginning(origin=origin, cursor=Cursor.start(config.data, source, new), seen=seen)


def rebegun(files: RunStore, config: GRPOConfig, source: PromptSource) -> Beginning:
    """The beginning of a run that is resumed before its first commit, by what it wrote then."""
    origin = origin_of(files)
    if origin is None:
        return Beginning(origin=None, cursor=Cursor.start(config.data, source))
    if config.continue_data == "cursor":
        owner = RunStore(files.store, origin.run)
        reached = Cursor.from_json(read_commit(owner, origin.step).cursor)
        return Beginning(origin=origin, cursor=reached)
    seen = seen_before(files)
    new = len(unseen(source, seen)) if config.continue_data == "unseen" and len(seen) else 0
    return Beginning(origin=origin, cursor=Cursor.start(config.data, source, new), seen=seen)


def fresh_rows(files: RunStore, cursor: Cursor, source: PromptSource) -> list[int]:
    """The unseen rows with which a run began that has some first; none in later epochs."""
    if not cursor.fresh or cursor.epoch > 0:
        return []
    return unseen(source, seen_before(files))


def _on_from(
    owner: RunStore, origin: Origin, reached: Cursor, config: GRPOConfig, source: PromptSource
) -> Beginning:
    if (len(source), source.digest) != (reached.size, reached.digest):
        raise ConfigError(
            f"continue_data = cursor, but the data are no longer those of {origin}: {reached.size} "
            f"rows then, {len(source)} rows of another content now. Set continue_data = unseen."
        )
    return Beginning(origin=origin, cursor=reached, seen=seen_before(owner))


def _place(files: RunStore, config: GRPOConfig) -> tuple[RunStore, int | None]:
    """The run that continue_from names, and the step; None for its last."""
    assert config.continue_from is not None
    if not config.continue_from.startswith(REGISTERED):
        name, _, step = config.continue_from.partition("@")
        return RunStore(files.store, name), int(step) if step else None
    model, _, alias = config.continue_from.removeprefix(REGISTERED).partition("@")
    try:
        found = Registry(config.tracking).by_alias(model, alias)
    except NotRegistered as error:
        raise ConfigError(f"continue_from: {error}") from error
    if found is None:
        raise ConfigError(
            f"continue_from = {config.continue_from}: no version of model {model} has the alias "
            f"{alias} at {config.tracking.uri}. Run once without continue_from and with "
            f"promotion.alias = {alias}, or set another alias."
        )
    if found.store_uri != files.store.uri:
        raise ConfigError(
            f"continue_from = {config.continue_from} is in the store {found.store_uri}, and "
            f"store.uri = {files.store.uri}. Set store.uri to the former."
        )
    return RunStore(files.store, found.run), found.step


def _check_snapshot(parent: RunStore, origin: Origin) -> None:
    base = base_of(RunStore(parent.store, origin.run), origin.step)
    if base is None or base.version != origin.step:
        raise ObjectMissing(
            f"the trainer's state of {origin} is not stored as a snapshot. Name a step with one, "
            "such as a run's last, or set continue_state = weights."
        )
