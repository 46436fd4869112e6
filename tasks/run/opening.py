"""From settings to a run that this process may write: open it, take it over, begin it.

`open_run` only reads. `take_over` keeps every other writer out and sees where the run stands. `begin`
is the first that writes to it. A run whose name is given, as by the Job of a Kubernetes cluster, is
begun once and then gone on with; its writer before may have been killed on another machine, and
`take_over` waits for its lease.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from configs.environment import GIT, installed, user, working_tree
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, validate
from configs.rewards import HOW_ASKED
from configs.storage import StoreConfig
from engines.meanings import VERSIONS
from storage.objects.errors import Conflict
from storage.objects.store import Store
from storage.prompts.cursor import Cursor, check_same_data
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource
from storage.runs.commit_log import Ledger, head, read_commit
from storage.runs.forks import pin
from storage.runs.live import DataOver, goes_on_as, is_done, read_end
from storage.runs.opponents import FIELD as OPPONENT
from storage.runs.opponents import keep, recorded_opponent
from storage.runs.retention import clear
from storage.runs.run_lease import RUN_OUT, LeaseWatch, RunLease, acquire_patiently
from storage.runs.run_store import (
    ORIGIN_FIELD,
    RUN_NAME,
    OwnRunStore,
    RollbackCause,
    RunStore,
    origin_of,
    parent_of,
)
from storage.runs.seen_rows import seen_before, write_seen
from tasks.results import Carried
from tasks.run.beginning import NothingNew, beginning, first_cursor, frozen_version, origin_of_fork
from tasks.run.facts import OpenedRun, Position
from tasks.run.features import Finding, features_of, tidy
from tasks.run.flow_run import FIELD as FLOW_RUN
from tasks.run.flow_run import flow_run_id
from tasks.run.meaning_changes import CODE_FILES as CODE_FILES
from tasks.run.meaning_changes import MEANINGS as MEANINGS
from tasks.run.meaning_changes import code_files
from tasks.run.run_record import (
    LONE_RANK_PLANS,
    check_decay,
    check_same_flow,
    names_to_begin_with,
    plans_to_begin_with,
    settings_of,
)
from tasks.run.run_record import VERSION_NAMES as VERSION_NAMES


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
    origin, digests = None, np.empty(0, np.uint64)
    if resume is not None:
        check_resumable(files, config, flow)
        _check_same_data(files, config, source)
        origin, digests = origin_of(files), seen_before(files)
    elif fork is not None:
        origin = origin_of_fork(config, fork, flow).model_copy(update={"rollback": cause})
        digests = seen_before(parent_of(files, origin))
    elif config.continue_from is not None:
        origin, digests = beginning(config)
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
        seen=digests,
        first=first_cursor(store, config, source, origin, digests),
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
    config, rest = opened.config, opened.first.remaining(opened.config.data.epochs)
    if rest is None or rest >= config.fewest_prompts:
        return
    sentence = (
        f"data.epochs = {config.data.epochs} leaves {rest} prompts of {opened.source.name}, and a "
        f"step takes {config.fewest_prompts}."
    )
    if config.continue_from is not None:
        raise NothingNew(f"Too little to train on: {sentence}")
    raise ConfigError(
        f"{sentence} Set data.epochs higher, prompts_per_step lower, or data.last_step = partial."
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
        own_head = head(opened.files) if opened.resumed else None
        if own_head is None:
            position = _inherited(opened)
        else:
            position = Position.after(read_commit(opened.files, own_head))
        failed.pop_all()
    return lease, position


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
        LONE_RANK_PLANS: plans_to_begin_with(files, origin),
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


# What may change between the parts of a run without making its past unrepeatable. A name stands
# for the setting and all below it; * is any entry of a list, and any name. A flow's settings have
# their own (GRPOConfig.may_change).
MAY_CHANGE = (
    "steps",
    "cluster",
    "tracking",
    "data.epochs",
    "data.last_step",
    "data.source.timeout",
    "store.options",
    "store.snapshot_every",
    "store.keep_versions",
    "store.keep_registered",
    "store.keep_registered_days",
    "store.keep_steps",
    "store.keep_snapshots",
    "store.cache_mib",
    "store.whole_every",
    "store.node_cache_gib",
    "store.uri",
    "data.quarantine",
    "guards",
    "max_rollbacks",
    "rollout.deadline",
    "rollout.max_sequences",
    "rollout.own_process",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.sleep_level",
    "rollout.probe_tolerance",
    "rewards.timeout",
    "rewards.functions.*.url",  # of a judge, which may have moved; commits say so
    *(f"rewards.functions.*.{name}" for name in HOW_ASKED),
    "train.deadline",
    "train.unit_lease",
    "train.expert_parallel",  # goes by the number of workers, which may change
    # Where the same numbers lie, and how often they are computed.
    "train.gradient_checkpointing",
    "train.recompute",
    "train.activation_offload",
    "train.reshard_after_forward",
    "train.optimizer_device",
    "train.weights_dtype",
    "train.master_weights",
    "evaluation",
    "promotion",
)

# Numbers of what is kept; None is all.
KEPT = {name for name in StoreConfig.model_fields if name.startswith("keep_")}


def check_resumable(files: RunStore, config: GRPOConfig, flow: str) -> None:
    """ConfigError unless the run is there, is the flow's, unfinished, and fits the settings."""
    if files.read_run() is None:
        raise ConfigError(
            f"There is no run {files.run} in {files.store.uri}. "
            "Give --resume the name of a run of that store, or set store.uri."
        )
    check_unchanged(files, config, flow)
    check_decay(config, files)
    committed = head(files) or 0
    end = read_end(files)
    if end is None or end.step != committed:
        return
    done = f"Run {files.run} is finished: {committed} of {config.steps} steps are committed"
    if committed >= config.steps and config.train.schedule != "constant":
        raise ConfigError(
            f"{done}. train.schedule = {config.train.schedule} has ended: to train on, fork it "
            f"(--fork {files.run}) with more steps."
        )
    if committed >= config.steps:
        raise ConfigError(f"{done}. Set steps higher to train on.")
    if end.data_over == DataOver.of(config.data):
        rest = ", or data.last_step = partial" if config.data.last_step == "drop" else ""
        raise ConfigError(
            f"{done}, and data.epochs = {config.data.epochs} is over. Set data.epochs higher{rest} "
            "to train on."
        )


def check_unchanged(files: RunStore, config: GRPOConfig, flow: str) -> None:
    """ConfigError unless the flow made the run, with settings that differ where they may."""
    check_same_flow(files, flow, config.store)
    recorded = settings_of(files).model_dump(mode="json")
    changed = [
        key
        for key in differing(recorded, config.model_dump(mode="json"))
        if not may_change(key, config.may_change)
    ]
    if changed:
        raise ConfigError(
            f"Run {files.run} was made with other values of {', '.join(changed)}. Set them back, or "
            "start a new run. On resuming only these may change: "
            f"{', '.join((*MAY_CHANGE, *config.may_change))}."
        )


def going_on_as(files: RunStore, config: GRPOConfig, flow: str) -> tuple[str, GRPOConfig]:
    """The run that goes on with a run, and its settings: another one where a guard rolled it back.

    `config`: for the run that was named; where it differs from what that began with, so do the
    settings of the one that goes on. Raises ConfigError where it may not.
    """
    end = read_end(files)
    if end is None or end.rolled_back is None:
        return files.run, config
    check_unchanged(files, config, flow)
    before = settings_of(files).model_dump(mode="json")
    changed = config.model_dump(mode="json")
    child = RunStore(files.store, end.rolled_back.child)
    settings = settings_of(child).model_dump(mode="json")
    for key in differing(before, changed):
        _place(settings, key, changed)
    return going_on_as(child, validate(type(config), settings), flow)


def _place(settings: Any, key: str, values: Any) -> None:
    """Put the value that `values` has at a dotted name into settings of the same form."""
    *parents, last = key.split(".")
    for part in parents:
        index: Any = int(part) if isinstance(settings, list) else part
        settings, values = settings[index], values[index]
    index = int(last) if isinstance(settings, list) else last
    settings[index] = values[index]


def keeping_no_less(files: RunStore, config: GRPOConfig, filled_in: bool = False) -> GRPOConfig:
    """The settings, by which no less of a stored run is kept than so far unless somebody said so.

    What a recipe or the words leave open has today's default, which may be another than when the run
    began. filled_in: a form has filled in what nobody set, so a default there is nobody's word.
    """
    store, usual, as_before = config.store, StoreConfig(), {}
    for name, before in settings_of(files).store.model_dump(include=KEPT).items():
        value = getattr(store, name)
        is_set = name in store.model_fields_set and not (
            filled_in and value == getattr(usual, name)
        )
        if not is_set and value is not None and (before is None or before > value):
            as_before[name] = before
    return (
        config.model_copy(update={"store": store.model_copy(update=as_before)})
        if as_before
        else config
    )


def told_kept(before: GRPOConfig, opened: GRPOConfig) -> list[Finding]:
    """That of a run which goes on more is kept than the settings ask that it was to go on with."""
    old, new = (config.store.model_dump(mode="json", include=KEPT) for config in (before, opened))
    words = [f"store.{name}={json.dumps(new[name])}" for name in differing(old, new)]
    if not words:
        return []
    sentence = (
        f"Kept as when the run began: {', '.join(words)}. To keep less, say so for this run: "
        "refrain … --resume RUN store.…=…"
    )
    return [Finding(check="settings", found=sentence, warning=True)]


def may_change(key: str, own: Sequence[str] = ()) -> bool:
    """Whether a setting may be another on resuming, by its dotted name; own: as in GRPOConfig."""
    names = (*MAY_CHANGE, *own)
    patterns = (re.escape(name).replace(r"\*", "[^.]+") for name in names)
    return any(re.fullmatch(rf"{pattern}(\..*)?", key) for pattern in patterns)


def differing(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted names of the settings in which two configs differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = []
        for name in sorted({*old, *new}):
            names += differing(old.get(name), new.get(name), f"{prefix}{name}.")
        return names
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [name for i, (a, b) in pairs for name in differing(a, b, f"{prefix}{i}.")]
    return [] if old == new else [prefix.removesuffix(".")]


def begun(config: GRPOConfig, name: str) -> bool:
    """Whether the store has the run. ConfigError for what cannot be a run's name."""
    if not RUN_NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name} is no name for a run. Use letters, digits, '.', '_' and '-', first a "
            "letter or a digit."
        )
    return _files(config, name).read_run() is not None


def finished(config: GRPOConfig, name: str) -> str:
    """What to say of a run of which all that is asked for is done; empty for another one."""
    files = goes_on_as(_files(config, name))
    step = head(files) or 0
    if step < config.steps or not is_done(files, step):
        return ""
    return f"Run {name} is finished: {step} of {config.steps} steps are committed."


def wait_for_writer(files: RunStore) -> str:
    """What to say where a process may still write the run, which is waited for; empty else."""
    holder = LeaseWatch(files).look()
    if holder is None:
        return ""
    return (
        f"Run {files.run} may still be written by {holder.owner} on {holder.host}: waiting up to "
        f"{RUN_OUT:.0f} s for it to say so again."
    )


def _files(config: GRPOConfig, name: str) -> RunStore:
    return RunStore(Store(config.store.uri, config.store.options), name)
