"""Whether a run in the store can go on under given settings."""

from __future__ import annotations

import json
import re
from typing import Any

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, validate
from configs.rewards import HOW_ASKED
from configs.storage import StoreConfig
from storage.runs.commit_log import head
from storage.runs.live import DataOver, read_end
from storage.runs.run_store import RunStore
from tasks.run.decay import check_decay
from tasks.run.findings import Finding
from tasks.run.recorded_flow import check_same_flow, settings_of

# What may change between the parts of a run without making its past unrepeatable. A name stands
# for the setting and all below it; * is any entry of a list, and any name.
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
    "dynamic_sampling.max_rounds",
    "dynamic_sampling.on_shortage",
    "rollout.deadline",
    "rollout.max_sequences",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.sleep_level",
    "rollout.probe_tolerance",
    "rewards.timeout",
    "rewards.functions.*.url",  # of a judge, which may have moved; commits say so
    *(f"rewards.functions.*.{name}" for name in HOW_ASKED),
    *(f"teachers.*.{name}" for name in ("service", "key_variable", "patience")),
    *(
        f"teachers.*.engine.{name}"
        for name in ("max_sequences", "kv_cache_gib", "gpu_memory_utilization")
    ),
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
    written = settings_of(files).model_dump(mode="json")
    changed = [
        key for key in differing(written, config.model_dump(mode="json")) if not may_change(key)
    ]
    if changed:
        raise ConfigError(
            f"Run {files.run} was made with other values of {', '.join(changed)}. Set them back, or "
            f"start a new run. On resuming only these may change: {', '.join(MAY_CHANGE)}."
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
    given = config.model_dump(mode="json")
    child = RunStore(files.store, end.rolled_back.child)
    settings = settings_of(child).model_dump(mode="json")
    for key in differing(before, given):
        _place(settings, key, given)
    return going_on_as(child, validate(type(config), settings), flow)


def _place(settings: Any, key: str, given: Any) -> None:
    """Put the value that `given` has at a dotted name into settings of the same form."""
    *parents, last = key.split(".")
    for part in parents:
        index: Any = int(part) if isinstance(settings, list) else part
        settings, given = settings[index], given[index]
    index = int(last) if isinstance(settings, list) else last
    settings[index] = given[index]


def keeping_no_less(files: RunStore, config: GRPOConfig, filled_in: bool = False) -> GRPOConfig:
    """The settings, by which no less of a stored run is kept than so far unless somebody said so.

    What a recipe or the words leave open has today's default, which may be another than when the run
    began. filled_in: a form has filled in what nobody set, so a default there is nobody's word.
    """
    store, usual, kept = config.store, StoreConfig(), {}
    for name, before in settings_of(files).store.model_dump(include=KEPT).items():
        given = getattr(store, name)
        said = name in store.model_fields_set and not (filled_in and given == getattr(usual, name))
        if not said and given is not None and (before is None or before > given):
            kept[name] = before
    return config.model_copy(update={"store": store.model_copy(update=kept)}) if kept else config


def told_kept(asked: GRPOConfig, opened: GRPOConfig) -> list[Finding]:
    """That of a run which goes on more is kept than the settings ask that it was to go on with."""
    old, new = (one.store.model_dump(mode="json", include=KEPT) for one in (asked, opened))
    kept = [f"store.{name}={json.dumps(new[name])}" for name in differing(old, new)]
    if not kept:
        return []
    said = (
        f"Kept as when the run began: {', '.join(kept)}. To keep less, say so for this run: "
        "refrain … --resume RUN store.…=…"
    )
    return [Finding(check="settings", found=said, warning=True)]


def may_change(key: str) -> bool:
    """Whether a setting may be another on resuming, by its dotted name."""
    patterns = (re.escape(one).replace(r"\*", "[^.]+") for one in MAY_CHANGE)
    return any(re.fullmatch(rf"{pattern}(\..*)?", key) for pattern in patterns)


def differing(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted names of the settings in which two configs differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in sorted({*old, *new}):
            found += differing(old.get(name), new.get(name), f"{prefix}{name}.")
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [name for i, (a, b) in pairs for name in differing(a, b, f"{prefix}{i}.")]
    return [] if old == new else [prefix.removesuffix(".")]
