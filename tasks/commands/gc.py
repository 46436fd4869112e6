"""What of a run's store its settings do not keep, and its removal."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.storage import StoreConfig
from configs.terminal_text import bytes_text
from storage.evaluations.results import notes_of
from storage.objects.dry_run import DryRunStore
from storage.objects.store import Store
from storage.runs.commit_log import head
from storage.runs.retention import clear, is_there, sweep
from storage.runs.run_lease import LeaseHeld, RunLease
from storage.runs.run_store import RunStore, start_of
from storage.tracking.connection import TrackingAddress, TrackingError
from storage.tracking.registry import that_stay, unsaid
from storage.tracking.tracker import Tracker
from tasks.commands.command import Answer, Request, heading, table, text
from tasks.run.features import tidy
from tasks.run.run_record import settings_of

if TYPE_CHECKING:
    from rich.console import RenderableType

OWNER = "refrain gc"  # as other processes are told who holds the run
PLACE = re.compile(r"(weights|state|critic|steps)/([^/]+)/")  # of a key, after the run's name
NAMES = {
    "weights": "policy versions",
    "state": "snapshots of the trainer",
    "critic": "snapshots of the critic's trainer",
    "steps": "steps with batches",
    "": "other objects",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Registry:
    """What MLflow says of the run's policy versions."""

    stay: frozenset[int] = frozenset()  # of the registered ones
    registered: int = 0  # how many are
    aliases: tuple[str, ...] = ()  # with their versions, for people
    tracker: Tracker | None = None  # of the run's page
    unknown: str = ""  # why nothing is known, and so every version stays


class _WhileHeld(Store):
    """A store from which is removed only while this process holds the run."""

    def __init__(self, store: Store, lease: RunLease) -> None:
        super().__init__(store.uri, store.options, store.cache_bytes)
        self._lease = lease

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._lease.check()
        super().delete(keys)


def answer(request: Request) -> Answer:
    """Say what would be removed, or remove it. Raises LeaseHeld while a flow works on the run."""
    files, arguments = request.files, request.arguments
    config = settings_of(files)
    keep = kept_by(config.store, request.store)
    done = head(files)
    if done is None:
        raise ConfigError(f"Run {files.run} has no committed step, so nothing of it is removed.")
    registry = _registry(request, config, keep)
    sizes = files.store.sizes_below(files.run)
    if arguments.delete:
        removed = _deleted(files, config, keep, registry)
        _say_what_is_gone(files, registry)
    else:
        dry = DryRunStore(files.store)
        _collect(replace(files, store=dry), config, keep, registry, done, dry=True)
        removed = dry.removed
    removed = sorted({*removed} & sizes.keys())  # an object that two reasons remove counts once
    gone_bytes = sum(sizes[key] for key in removed)
    record = {
        "run": files.run,
        "deleted": arguments.delete,
        "objects": removed,
        "bytes": gone_bytes,
        "bytes_before": sum(sizes.values()),
        "registered": registry.registered,
        "registered_kept": sorted(registry.stay),
        "registry": registry.unknown or None,
    }
    what = "were removed" if arguments.delete else "would be removed by --delete; nothing was yet"
    rest = sum(sizes.values()) - gone_bytes
    lines: list[RenderableType] = [
        heading(
            f"{files.run}: {len(removed)} objects of {bytes_text(gone_bytes)} {what}. "
            f"{len(sizes) - len(removed)} of {bytes_text(rest)} stay."
        )
    ]
    lines += _kinds(files, removed, sizes) if removed else []
    lines.append(text(_registered_line(registry)))
    return Answer(record=record, shown=lines)


def _say_what_is_gone(files: RunStore, registry: Registry) -> None:
    """Of what this process removed, or one before it that died, have the registry say so."""
    if registry.tracker is None:
        return
    versions = registry.tracker.registered_versions()
    gone = unsaid(versions, partial(is_there, files))
    if gone:
        registry.tracker.tag_removed(gone)
    if staying := [
        version.version for version in versions if version.going and version.version not in gone
    ]:
        registry.tracker.take_back(staying)


def kept_by(recorded: StoreConfig, settings: StoreConfig) -> StoreConfig:
    """What the run's settings keep, with the settings keep_… of the command line."""
    words = {name for name in settings.model_fields_set if name.startswith("keep_")}
    return recorded.model_copy(update=settings.model_dump(include=words))


def _deleted(
    files: RunStore, config: GRPOConfig, keep: StoreConfig, registry: Registry
) -> list[str]:
    try:
        lease = RunLease.acquire(files, OWNER)
    except LeaseHeld as error:
        raise LeaseHeld(
            f"{error} A run that goes removes by itself, after each step, what its settings do not "
            "keep."
        ) from None
    with lease:
        done = head(files)  # only now: a moment ago a flow may have been committing
        assert done is not None, "commits stay"
        guarded = replace(files, store=_WhileHeld(files.store, lease))
        return _collect(guarded, config, keep, registry, done)


def _collect(
    files: RunStore,
    config: GRPOConfig,
    keep: StoreConfig,
    registry: Registry,
    done: int,
    dry: bool = False,
) -> list[str]:
    """Remove it; returns the keys. The same as after a step, and what dead writers left."""
    start = start_of(files)
    tagged = {*registry.stay, *_to_be_evaluated(files, config, start, done)}
    if registry.unknown:
        tagged |= {*files.versions()}
    removed = tidy(config, files, done)
    removed += sweep(
        files,
        keep_versions=keep.keep_versions,
        keep_steps=keep.keep_steps,
        keep_snapshots=keep.keep_snapshots,
        tagged=tagged,
        rebuilt_from=max(start, done - config.rollback_steps),
        may_go=None if dry or registry.tracker is None else registry.tracker.let_go,
    )
    return removed + clear(files, done)


def _to_be_evaluated(files: RunStore, config: GRPOConfig, start: int, done: int) -> set[int]:
    """The versions whose evaluation beside the steps a flow that ended has left undone."""
    evaluation = config.evaluation
    if evaluation is None or not config.evaluates_aside:
        return set()
    noted = {(suite, version) for suite, version, _ in notes_of(files).values()}
    return {
        version
        for version in range(start, done + 1)
        if evaluation.due(version, start)
        and any((suite, version) not in noted for suite in evaluation.suites)
    }


def _registry(request: Request, config: GRPOConfig, keep: StoreConfig) -> Registry:
    """What MLflow says; where it cannot, why every policy version stays."""
    files, arguments = request.files, request.arguments
    if arguments.without_registry:
        return Registry()
    tracking = config.tracking
    if arguments.tracking is not None:
        tracking = type(tracking).model_validate(
            {**tracking.model_dump(), "uri": arguments.tracking}
        )
    place = TrackingAddress.of(tracking.uri)
    missing = (
        "No policy version was looked at, since {why} and aliases are not known. Give --tracking "
        "URI of the MLflow that has the run, or --without-registry where none has."
    )
    if place.database is not None and not place.database.exists():
        return Registry(unknown=missing.format(why=f"there is no file {place.database}"))
    tracker = Tracker(tracking)
    try:
        if not tracker.reopen(files.run, files.store.uri):
            why = f"MLflow at {tracking.uri} has no page of this run in this store"
            return Registry(unknown=missing.format(why=why))
        versions = tracker.registered_versions()
    except TrackingError as error:
        return Registry(unknown=missing.format(why=f"MLflow does not answer ({error})"))
    stay = that_stay(versions, keep.keep_registered, keep.keep_registered_days, time.time())
    there = [version for version in versions if not version.removed]
    aliases = [f"{alias} (v{version.version})" for version in there for alias in version.aliases]
    return Registry(
        stay=frozenset(stay), registered=len(there), aliases=tuple(aliases), tracker=tracker
    )


def _registered_line(registry: Registry) -> str:
    if registry.unknown:
        return registry.unknown
    if registry.tracker is None:
        return "MLflow was not asked: registered versions were treated as any other."
    under = f"; with an alias: {', '.join(registry.aliases)}" if registry.aliases else ""
    return (
        f"{registry.registered} versions are registered in MLflow{under}. store.keep_registered and "
        "store.keep_registered_days say which others stay."
    )


def _kinds(files: RunStore, removed: list[str], sizes: dict[str, int]) -> list[RenderableType]:
    """A table: what the objects belong to."""
    places: dict[str, set[str]] = {kind: set() for kind in NAMES}
    nbytes = dict.fromkeys(NAMES, 0)
    for key in removed:
        place = PLACE.match(key.removeprefix(f"{files.run}/"))
        kind, name = (place[1], place[2]) if place else ("", key)
        places[kind].add(name)
        nbytes[kind] += sizes[key]
    rows = table("what", "how many", "bytes", "which", right=("how many", "bytes"))
    for kind, names in places.items():
        if names:
            first = [name.lstrip("v0") or "0" for name in sorted(names)] if kind else sorted(names)
            more = f", … {first[-1]}" if len(first) > 6 else ""
            rows.add_row(
                NAMES[kind], str(len(names)), bytes_text(nbytes[kind]),
                text(", ".join(first[:5] if more else first) + more),
            )  # fmt: skip
    return [rows]
