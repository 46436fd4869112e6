"""Which of a run's registered policy versions stay in the store: by alias, number and age.

MLflow's registry knows which are registered, since when, and under which aliases; the settings say
how many stay (`store.keep_registered`, `store.keep_registered_days`). What is removed keeps its entry
in the registry, with a tag that says so.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

REMOVED_TAG = "refrain.removed"  # when retention removed the version's files
DAY = 86400.0  # seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredVersion:
    """A policy version of a run, as the registry has it."""

    version: int  # of the policy
    model: str  # name in the registry
    number: str  # MLflow's
    at: float  # when it was registered, in seconds since 1970
    aliases: tuple[str, ...] = ()
    removed: bool = False  # its files are known to be gone


def versions_of(client: MlflowClient, run_id: str) -> list[RegisteredVersion]:
    """The policy versions that a run of MLflow's has registered, by any name, oldest first."""
    found = list(client.search_model_versions(f"run_id = '{run_id}'"))
    # A search says nothing of aliases; the model has them all.
    aliases = {name: client.get_registered_model(name).aliases for name in {v.name for v in found}}
    versions = []
    for one in found:
        if "refrain.version" not in one.tags:
            continue
        number = str(one.version)
        own = [alias for alias, of in aliases[one.name].items() if str(of) == number]
        versions.append(
            RegisteredVersion(
                version=int(one.tags["refrain.version"]),
                model=one.name,
                number=number,
                at=one.creation_timestamp / 1000,
                aliases=tuple(own),
                removed=REMOVED_TAG in one.tags,
            )
        )
    return sorted(versions, key=lambda one: (one.version, one.at))


def that_stay(
    registered: Sequence[RegisteredVersion], keep: int | None, days: float, now: float
) -> set[int]:
    """The policy versions that retention leaves.

    Args:
        keep: so many, the newest; None: all.
        days: those registered since so many days, however many.
        now: seconds since 1970.

    Those that have an alias stay whatever their number and age.
    """
    versions = sorted({one.version for one in registered})
    newest = versions if keep is None else versions[len(versions) - min(keep, len(versions)) :]
    young = {one.version for one in registered if now - one.at < days * DAY}
    return {*newest, *young, *(one.version for one in registered if one.aliases)}


def tag_removed(
    client: MlflowClient, registered: Sequence[RegisteredVersion], gone: Collection[int]
) -> None:
    """Have the registry say of the policy versions in `gone` that their files are no longer there."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for one in registered:
        if one.version in gone and not one.removed:
            text = f"{today}, by store.keep_registered of its run"
            client.set_model_version_tag(one.model, one.number, REMOVED_TAG, text)
