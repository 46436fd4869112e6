"""From settings to a run that this process may write: open it, take it over, begin it.

`open_run` only reads. `take_over` keeps every other writer out and sees where the run stands. `begin`
is the first that writes to it.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
from dataclasses import asdict
from pathlib import Path

import numpy as np

from configs.environment import GIT as GIT
from configs.environment import user, working_tree
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from engines.meanings import VERSIONS
from storage.objects.errors import Conflict
from storage.objects.store import Store
from storage.prompts.cursor import Cursor, check_same_data
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource
from storage.runs.commit_log import Ledger, head, read_commit
from storage.runs.forks import pin
from storage.runs.opponents import FIELD as OPPONENT
from storage.runs.opponents import keep, recorded_opponent
from storage.runs.retention import clear
from storage.runs.run_lease import RunLease, acquire_patiently
from storage.runs.run_store import (
    ORIGIN_FIELD,
    OwnRunStore,
    RollbackCause,
    RunStore,
    origin_of,
    parent_of,
)
from storage.runs.seen_rows import seen_before, write_seen
from tasks.results import Carried
from tasks.run.code_changes import FIELD as CODE_FILES
from tasks.run.code_changes import code_files
from tasks.run.continue_from import NothingNew, beginning, first_cursor
from tasks.run.features import features_of, tidy
from tasks.run.flow_run import FIELD as FLOW_RUN
from tasks.run.flow_run import flow_run_id
from tasks.run.forking import origin_of_fork
from tasks.run.meaning_changes import FIELD as MEANINGS
from tasks.run.opened_run import OpenedRun, Position
from tasks.run.opponent import frozen_version
from tasks.run.packages import installed
from tasks.run.resuming import check_resumable, going_on_as, keeping_no_less
from tasks.run.version_names import FIELD as VERSION_NAMES
from tasks.run.version_names import names_to_begin_with


def open_run(
    flow: str,
    config: GRPOConfig,
    resume: str | None = None,
    fork: str | None = None,
    name: str | None = None,
    cause: RollbackCause | None = None,
    filled_in: bool = False,
) -> OpenedRun:
    """The run that these settings mean: a stored one that goes on, or a new one, perhaps a fork.

    `flow`: package.module:function that is to make it. `resume`: of a run that was rolled back, the
    one that goes on with it is meant. `fork`: RUN@STEP; `name`, `cause`: of a fork that a rollback
    makes. `filled_in`: by a form, which has every setting, set or not. Raises ConfigError where it
    cannot be, and NothingNew where there is nothing to do.
    """
    store = Store(config.store.uri, config.store.options, cache_bytes=config.store.cache_mib << 20)
    if resume is not None:
        before = RunStore(store, resume)
        if before.read_run() is not None:
            config = keeping_no_less(before, config, filled_in)
        resume, config = going_on_as(before, config, flow)
    files = OwnRunStore(store, resume or name or new_name(config.name))
    source = open_source(config.data.source)
    origin, seen = None, np.empty(0, np.uint64)
    if resume is not None:
        check_resumable(files, config, flow)
        _check_same_data(files, config, source)
        origin, seen = origin_of(files), seen_before(files)
    elif fork is not None:
        origin = origin_of_fork(config, fork, flow).model_copy(update={"rollback": cause})
        seen = seen_before(parent_of(files, origin))
    elif config.continue_from is not None:
        origin, seen = beginning(config)
    if resume is None:
        for feature in features_of(config):
            config = feature.pin(store, config)
    opened = OpenedRun(
        name=files.run,
        flow=flow,
        config=config,
        files=files,
        source=source,
        resumed=resume is not None,
        origin=origin,
        seen=seen,
        first=first_cursor(store, config, source, origin, seen),
        opponent=(
            recorded_opponent(files)
            if resume is not None
            else frozen_version(config, store, origin if fork is not None else None)
        ),
    )
    if not opened.resumed:
        _check_first_step(opened)
    return opened


def new_name(family: str) -> str:
    """A name for a new run: family, UTC time, and four characters against coincidence."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return f"{family}-{now}-{secrets.token_hex(2)}"


def _check_same_data(files: RunStore, config: GRPOConfig, source: PromptSource) -> None:
    """ConfigError where a run has steps left to draw, and the data are not those of its last step."""
    step = head(files)
    if step is None or step >= config.steps:
        return
    cursor = Cursor.from_json(read_commit(files, step).cursor)
    try:
        check_same_data(source.as_recorded(cursor.digest), cursor)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_first_step(opened: OpenedRun) -> None:
    """ConfigError, or NothingNew for a run that goes on, where the data's epochs give no step."""
    config, left = opened.config, opened.first.remaining(opened.config.data.epochs)
    if left is None or left >= config.fewest_prompts:
        return
    said = (
        f"data.epochs = {config.data.epochs} leaves {left} prompts of {opened.source.name}, and a "
        f"step takes {config.fewest_prompts}."
    )
    if config.continue_from is not None:
        raise NothingNew(f"Too little to train on: {said}")
    raise ConfigError(
        f"{said} Set data.epochs higher, prompts_per_step lower, or data.last_step = partial."
    )


def take_over(opened: OpenedRun, waits: bool = False) -> tuple[RunLease, Position]:
    """Keep every other writer out, then see where the run stands. Raises LeaseHeld.

    The lease renews itself until it is released. waits: for the end of another process, which may
    have been killed on a machine that cannot be asked.
    """
    owner = f"{user()}'s flow"
    take = acquire_patiently if waits else RunLease.acquire
    lease = take(opened.files, owner)
    with contextlib.ExitStack() as failed:
        failed.callback(lease.release)
        lease.keep()
        # Only now: until a moment ago another flow may have been committing.
        if not opened.resumed and opened.files.read_run() is not None:
            raise Conflict(
                f"Run {opened.name} was begun by another process meanwhile. Give the same command "
                "again to go on with it."
            )
        own = head(opened.files) if opened.resumed else None
        position = _inherited(opened) if own is None else _committed(opened, own)
        failed.pop_all()
    return lease, position


def _committed(opened: OpenedRun, step: int) -> Position:
    return Position.after(read_commit(opened.files, step))


def _inherited(opened: OpenedRun) -> Position:
    """Where a run without a step of its own stands."""
    origin = opened.origin
    if origin is None or not origin.fork:
        return Position(head=opened.start, last=None, cursor=opened.first, ledger=Ledger())
    last = read_commit(parent_of(opened.files, origin), origin.step)
    goes_on = origin.cursor  # with the same data, and so with the groups that the parent had begun
    return Position(
        head=opened.start,
        last=last,
        cursor=opened.first,
        ledger=last.ledger if goes_on else last.ledger.settled(),
        carried=Carried.of(last) if goes_on else Carried(),
    )


def begin(opened: OpenedRun, position: Position) -> None:
    """Clear what a writer that died left, or put a new run on record. Only under the run's lease."""
    files, origin = opened.files, opened.origin
    if opened.resumed:
        clear(files, position.head)
        tidy(opened.config, files, position.head)
        return
    if origin is not None and not origin.fork:
        write_seen(files, opened.seen)
    record: dict[str, object] = {
        "config": opened.config.model_dump(mode="json"),
        "code": installed("refrain-rl") or "a checkout that is not installed",
        "flow": opened.flow,
        MEANINGS: dict(VERSIONS),
        CODE_FILES: code_files(opened.config),
        VERSION_NAMES: names_to_begin_with(files, origin),
    }
    if (of := flow_run_id()) is not None:
        record[FLOW_RUN] = str(of)
    tree = working_tree(Path.cwd())
    if tree is not None:
        record[GIT] = asdict(tree)
    if origin is not None:
        record[ORIGIN_FIELD] = origin.model_dump(mode="json")
    if opened.opponent is not None:
        record[OPPONENT] = opened.opponent.model_dump(mode="json")
    files.write_run(record)
    for feature in features_of(opened.config):
        feature.begin(files, opened.config)
    if origin is not None:
        pin(files, origin)
    if opened.opponent is not None:
        keep(files, opened.opponent)
