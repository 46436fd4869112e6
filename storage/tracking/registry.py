"""Policy versions in MLflow's model registry: found by alias, judged, given an alias, let go.

Which of a run's registered versions stay in the store goes by alias, number and age: the registry
knows which are registered, since when, and under which aliases; the settings say how many stay
(`store.keep_registered`, `store.keep_registered_days`). What is removed keeps its entry in the
registry, with a tag that says so. Before anything is removed the registry says what will be, and is
then asked for aliases once more: one that was given until then keeps its version, and who gives one
later has read the tag.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.tracking.connection import TrackingAddress

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from configs.storage import TrackingConfig

RUN_TAG = "refrain.run"
STORE_TAG = "refrain.store"
RECORD_TAG = "refrain.record"  # of a run's page; see TrackedRun.record
VERSION_TAG = "refrain.version"  # of a model and a registered version, as the next two
DIGEST_TAG = "refrain.digest"
URI_TAG = "refrain.uri"
EVALUATION_TAG = "refrain.evaluation"  # mean held-out reward
EVALUATED_ON_TAG = "refrain.evaluated_on"  # digest of rows and manner of the evaluation
PROMOTION_TAG = "refrain.promotion"  # why the version was promoted, or was not

GOING_TAG = "refrain.to_be_removed"  # since when retention is about to remove the version's files
REMOVED_TAG = "refrain.removed"  # when it did
DAY = 86400.0  # seconds


class NotRegistered(ValueError):
    """There is no such version; the message is one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """A policy version in the registry."""

    model: str
    number: str  # MLflow's
    run: str  # that made it
    step: int
    store_uri: str
    evaluation: float | None  # mean held-out reward, where it was measured
    evaluated_on: str | None


class Registry:
    """The model registry at a tracking address. Imports MLflow when it is opened."""

    def __init__(self, config: TrackingConfig) -> None:
        self._client: MlflowClient = TrackingAddress.of(config.uri).connect()

    def by_alias(self, model: str, alias: str) -> Registered | None:
        """The version that has an alias; None when none has."""
        from mlflow.exceptions import MlflowException

        try:
            entry = self._client.get_model_version_by_alias(model, alias)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        tags = entry.tags
        if entry.run_id is None or "refrain.step" not in tags:
            raise NotRegistered(
                f"models:/{model}@{alias} (version {entry.version}) was not registered by Refrain, "
                "so the run that made it is not known."
            )
        run = self._client.get_run(entry.run_id)
        evaluation = tags.get(EVALUATION_TAG)
        return Registered(
            model=model,
            number=str(entry.version),
            run=run.data.tags[RUN_TAG],
            step=int(tags["refrain.step"]),
            store_uri=tags[STORE_TAG],
            evaluation=None if evaluation is None else float(evaluation),
            evaluated_on=tags.get(EVALUATED_ON_TAG),
        )

    def tags(self, model: str, number: str) -> dict[str, str]:
        """The tags of a version."""
        return dict(self._client.get_model_version(model, number).tags)

    def tag(self, model: str, number: str, tags: Mapping[str, str]) -> None:
        """Write tags on a version."""
        for name, value in tags.items():
            self._client.set_model_version_tag(model, number, name, value)

    def give(self, model: str, alias: str, number: str) -> None:
        """Move an alias to a version."""
        self._client.set_registered_model_alias(model, alias, number)


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredVersion:
    """A policy version of a run, as the registry has it."""

    version: int  # of the policy
    model: str  # name in the registry
    number: str  # MLflow's
    at: float  # when it was registered, in seconds since 1970
    aliases: tuple[str, ...] = ()
    going: bool = False  # its files are about to be removed, or were just before a process died
    removed: bool = False  # its files are known to be gone


def versions_of(client: MlflowClient, run_id: str) -> list[RegisteredVersion]:
    """The policy versions that a run of MLflow's has registered, by any name, oldest first."""
    entries = list(client.search_model_versions(f"run_id = '{run_id}'"))
    # A search says nothing of aliases; the model has them all.
    aliases = {
        name: client.get_registered_model(name).aliases for name in {v.name for v in entries}
    }
    versions = []
    for entry in entries:
        if "refrain.version" not in entry.tags:
            continue
        number = str(entry.version)
        names = [alias for alias, of in aliases[entry.name].items() if str(of) == number]
        versions.append(
            RegisteredVersion(
                version=int(entry.tags["refrain.version"]),
                model=entry.name,
                number=number,
                at=entry.creation_timestamp / 1000,
                aliases=tuple(names),
                going=GOING_TAG in entry.tags,
                removed=REMOVED_TAG in entry.tags,
            )
        )
    return sorted(versions, key=lambda entry: (entry.version, entry.at))


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
    versions = sorted({entry.version for entry in registered})
    newest = versions if keep is None else versions[len(versions) - min(keep, len(versions)) :]
    young = {entry.version for entry in registered if now - entry.at < days * DAY}
    return {*newest, *young, *(entry.version for entry in registered if entry.aliases)}


def let_go(client: MlflowClient, run_id: str, versions: Collection[int]) -> set[int]:
    """Those of these policy versions that may be removed, which the registry says first."""
    for entry in versions_of(client, run_id):
        if entry.version in versions and not (entry.going or entry.removed):
            text = f"since {_today()}, by store.keep_registered of its run; an alias would keep it"
            client.set_model_version_tag(entry.model, entry.number, GOING_TAG, text)
    entries = [entry for entry in versions_of(client, run_id) if entry.version in versions]
    stay = {entry.version for entry in entries if entry.aliases}
    take_back(client, entries, stay)
    return {*versions} - stay


def take_back(
    client: MlflowClient, registered: Sequence[RegisteredVersion], staying: Collection[int]
) -> None:
    """Have the registry no longer say that the policy versions in `staying` are about to go."""
    for entry in registered:
        if entry.going and entry.version in staying:
            client.delete_model_version_tag(entry.model, entry.number, GOING_TAG)


def unsaid(registered: Sequence[RegisteredVersion], there: Callable[[int], bool]) -> list[int]:
    """The policy versions that a process removed which died before the registry said so."""
    return sorted(
        {entry.version for entry in registered if entry.going and not there(entry.version)}
    )


def tag_removed(
    client: MlflowClient, registered: Sequence[RegisteredVersion], gone: Collection[int]
) -> None:
    """Have the registry say of the policy versions in `gone` that their files are no longer there."""
    for entry in registered:
        if entry.version not in gone:
            continue
        if not entry.removed:
            text = f"{_today()}, by store.keep_registered of its run"
            client.set_model_version_tag(entry.model, entry.number, REMOVED_TAG, text)
        if entry.going:
            client.delete_model_version_tag(entry.model, entry.number, GOING_TAG)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
