"""`refrain gc` on a real store and a real registry: what it removes, and what a kill in it leaves."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from configs.storage import StoreConfig
from storage.objects.backends import LocalBackend
from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.forks import begin_at, check_state, pin
from storage.runs.run_lease import LeaseHeld, RunLease
from storage.runs.run_store import RunStore
from storage.runs.snapshots import snapshots
from storage.runs.weights import MANIFEST, stream
from storage.tracking.registry import Registry
from storage.tracking.tracker import Tracker
from tasks.commands import gc
from tasks.commands.command import Answer, Request
from tests.storage.runs.test_retention import snapshot_of, step_of, versions
from tests.storage.tracking.test_tracker import page

STEPS, KEPT = 10, {"store.keep_versions": 1, "store.keep_steps": 2, "store.keep_snapshots": 1}
FORKED = 4  # the step that a child of the run began at


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stopped run of ten steps, nothing removed yet, and a child of its step 4."""
    folder = tmp_path_factory.mktemp("gc")
    words = [f"{key}={value}" for key, value in KEPT.items()]
    uri = f"file://{folder}/store"
    words += [f"store.uri={uri}", f"tracking.uri=sqlite:///{folder}/mlflow.db", "steps=12"]
    config = load_recipe(GRPOConfig, "tiny", [*words, "store.snapshot_every=3"])
    run = RunStore(Store(uri), "run")
    run.write_run({"config": config.model_dump(mode="json"), "flow": "flows.grpo:grpo"})
    for step in range(1, STEPS + 1):
        step_of(run, step)
        if step in (3, 6, 9):
            snapshot_of(run, step)
    child = RunStore(run.store, "child")
    child.write_run({})
    pin(child, begin_at(run, FORKED, fork=True))
    run.store.write(f"{run.step_key(STEPS + 1)}/rollout/1-k.safetensors", b"a finished shard")
    run.store.write(
        f"{run.weights_key(STEPS + 1)}/model.safetensors", b"of a step without a commit"
    )
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> RunStore:
    """A copy of it."""
    shutil.copytree(made / "store", tmp_path / "store")
    return RunStore(Store(f"file://{tmp_path}/store"), "run")


def asked(run: RunStore, *words: str, keep: StoreConfig | None = None) -> Request:
    options = argparse.Namespace(
        delete="--delete" in words, without_registry="--registry" not in words, tracking=None
    )
    for word in words:
        if word.startswith("sqlite:"):
            options.tracking = word
    return Request(files=run, store=keep or StoreConfig(), cluster=(), arguments=options)


def keys(run: RunStore) -> set[str]:
    """All but what a writer keeps for itself."""
    return {key for key in run.store.list(run.run) if key.rpartition("/")[2] not in OWN}


OWN = ("LEASE", "index.json", "retention.json")


def is_sound(run: RunStore) -> None:
    """Whoever resumes, replays, forks or loads a version finds all of it."""
    assert head(run) == STEPS
    commits = [read_commit(run, step) for step in range(1, STEPS + 1)]
    check_state(run, STEPS)
    check_state(run, FORKED)
    begin_at(run, FORKED, fork=True)
    for step in (FORKED, *range(STEPS - 1, STEPS + 1)):
        for ref in commits[step - 1].refs.values():
            ref.verify(run.store)
    there = [number for number in run.versions() if _has_manifest(run, number)]
    assert {0, FORKED, STEPS} <= {*there}
    for number in there:
        if number <= STEPS:
            list(
                stream(
                    run.store,
                    commits[max(number, 1) - 1].version_out if number else commits[0].version_in,
                )
            )
    assert run.store.exists(f"{run.step_key(STEPS + 1)}/rollout/1-k.safetensors")


def _has_manifest(run: RunStore, version: int) -> bool:
    return run.store.exists(f"{run.weights_key(version)}/{MANIFEST}")


def test_a_dry_run_says_what_would_go_and_changes_nothing(run: RunStore) -> None:
    before = {key: run.store.read(key) for key in run.store.list()}
    said = gc.answer(asked(run)).record
    assert {key: run.store.read(key) for key in run.store.list()} == before
    assert said["objects"] and not said["deleted"]
    assert said["bytes"] == sum(len(before[key]) for key in said["objects"])
    done = gc.answer(asked(run, "--delete")).record
    assert done["objects"] == said["objects"], "it said what is then done"
    assert keys(run) == {*before} - {*said["objects"]} - {f"{run.run}/{one}" for one in OWN} - {
        key for key in before if not key.startswith("run/")
    }
    is_sound(run)
    assert versions(run) == [0, 4, 9, 10] and snapshots(run) == [3, 9]
    assert gc.answer(asked(run, "--delete")).record["objects"] == [], "there is no more"


def test_other_settings_can_be_given(run: RunStore) -> None:
    all_of_them = StoreConfig(keep_versions=99, keep_snapshots=99, keep_steps=None)
    said = gc.answer(asked(run, keep=all_of_them)).record
    assert said["objects"] == ["run/weights/v000011/model.safetensors"], "of no commit"


@pytest.mark.slow
def test_registered_versions_stay_by_alias_and_number(
    run: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gc.settings_of(run).tracking.model_copy(
        update={"uri": f"sqlite:///{tmp_path}/m.db", "system_metrics": 0}
    )
    unknown = gc.answer(asked(run, "--registry", "--delete", config.uri)).record
    assert f"there is no file {tmp_path}/m.db" in unknown["registry"]
    assert versions(run) == [*range(STEPS + 1)], "what nobody could be asked about stays"
    tracker = Tracker(config)
    tracker.start(page("run").__class__(**{**_fields(page("run")), "store_uri": run.store.uri}))
    for version in (1, 2, 8, 9, 10):
        weights = read_commit(run, version).version_out
        tracker.register_version(
            version, uri=run.store.url(weights.key), digest=weights.digest, step=version,
            store_uri=run.store.uri,
        )  # fmt: skip
    Registry(config).give(tracker.model_name, "champion", tracker.registered()[2])
    keep = StoreConfig(keep_registered=2)

    def promoted(*given: Any) -> gc.Registry:
        """Somebody promotes version 8 between the question and the removal."""
        known = asks(*given)
        Registry(config).give(tracker.model_name, "late", tracker.registered()[8])
        return known

    asks = gc._registry
    monkeypatch.setattr(gc, "_registry", promoted)
    said = gc.answer(asked(run, "--registry", "--delete", config.uri, keep=keep))
    assert said.record["registered_kept"] == [2, 9, 10]
    assert versions(run) == [0, 2, 4, 8, 9, 10]
    assert "champion (v2)" in shown(said)
    is_sound(run)
    known = tracker.registered_versions()
    assert [one.version for one in known if one.removed] == [1]
    assert [one.version for one in known if one.going] == []


def _fields(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in type(one).__slots__}


def shown(answer: Answer) -> str:
    return "\n".join(str(part) for part in answer.shown)


def test_a_run_at_work_is_left_alone(run: RunStore) -> None:
    with RunLease.acquire(run, "somebody's flow"):
        assert gc.answer(asked(run)).record["objects"], "looking is free"
        with pytest.raises(LeaseHeld, match="removes by itself"):
            gc.answer(asked(run, "--delete"))
    assert versions(run) == [*range(STEPS + 1), STEPS + 1] or versions(run) == [*range(STEPS + 1)]


def test_a_run_without_a_step_has_nothing_to_remove(run: RunStore) -> None:
    new = RunStore(run.store, "new")
    record = run.read_run()
    assert record is not None
    new.write_run(record)
    with pytest.raises(ConfigError, match="Run new has no committed step"):
        gc.answer(asked(new))


def killed_at(run: RunStore, count: int) -> bool:
    """Carry it out in a process that is killed before it removes its `count`-th object.

    True where it was; the registry has an alias on version 2.
    """
    if (pid := os.fork()) == 0:
        left, remove = count, LocalBackend.delete

        def delete(self: LocalBackend, wanted: list[str]) -> None:
            nonlocal left
            for key in wanted:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                remove(self, [key])

        LocalBackend.delete = delete  # type: ignore[method-assign,assignment]
        gc._registry = lambda *_: gc.Registry(stay=frozenset({2}))  # type: ignore[assignment]
        try:
            gc.answer(asked(run, "--delete"))
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_anywhere_leaves_a_store_that_is_read_and_cleared(
    run: RunStore, tmp_path: Path, every: int
) -> None:
    gc.answer(asked(run))  # imports what each child would, once
    shutil.copytree(tmp_path / "store", tmp_path / "new")
    assert not killed_at(run, 10**6)
    whole, kills = keys(run), 0
    assert versions(run) == [0, 2, 4, 9, 10]
    for count in range(1, 200, every):
        shutil.rmtree(tmp_path / "store")
        shutil.copytree(tmp_path / "new", tmp_path / "store")
        if not killed_at(run, count):
            break
        kills += 1
        is_sound(run)
        list(stream(run.store, read_commit(run, 2).version_out))  # that has the alias
        assert not killed_at(run, 10**6), "who comes next takes over at once"
        assert keys(run) == whole
    is_sound(run)
    assert kills >= 4


@pytest.mark.slow
def test_the_command_by_its_words(run: RunStore) -> None:
    words = [sys.executable, "-m", "flows", "gc", "run", f"store.uri={run.store.uri}"]
    words += ["--without-registry", "store.keep_snapshots=2"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "would be removed by --delete; nothing was yet" in said and "policy versions" in said
    done = subprocess.run(
        [*words, "--delete", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["deleted"] and snapshots(run) == [3, 6, 9]
    is_sound(run)
