"""Which version plays against a new run: by its name, by its parent's, and whether it fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.families import make
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.commit_log import Commit, commit, read_commit
from storage.runs.forks import begin_at
from storage.runs.opponents import FIELD, Opponent
from storage.runs.run_store import Origin, RunStore
from storage.runs.snapshots import mark
from storage.runs.weights_writing import publish
from tasks.run.beginning import frozen_version


def settings(folder: Path, version: str = "start", *words: str) -> GRPOConfig:
    game = "{environment: {kind: class, path: 'games.py:Game'}, players: 2, opponent: {}}"
    own = [
        f"store.uri=file://{folder}/store",
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
        f"episodes={game}",
        f"episodes.opponent.version={version}",
        "rewards.functions=[{kind: environment}]",
    ]
    return load_recipe(GRPOConfig, "tiny", [*own, *words])


def made(folder: Path, name: str, version: str = "start", **record: object) -> RunStore:
    """A run of two steps, whose own opponent is a version."""
    run = RunStore(Store(f"file://{folder}/store"), name)
    config = settings(folder, version).model_dump(mode="json")
    run.write_run({"config": config, "flow": "flows.grpo:grpo", **record})
    versions = [
        publish(run.store, name, v, [("w", torch.full((2,), float(v)))], {}) for v in range(3)
    ]
    for step in (1, 2):
        ref = write_batch(run.store, run.stage_key(step, "b", 1, "k"), {"x": [1.0]})
        before, after = versions[step - 1], versions[step]
        record_of = {"step": step, "parent": step - 1, "refs": {"batch": ref}}
        commit(run, Commit(**record_of, version_in=before, version_out=after))  # type: ignore[arg-type]
    run.store.write(f"{run.state_key(2)}/0.distcp", b"state")
    mark(run, 2)
    return run


def test_it_is_the_first_version_or_one_of_another_run(tmp_path: Path) -> None:
    other = made(tmp_path, "other")
    assert frozen_version(settings(tmp_path), other.store, None) is None
    for named, step in (("other@1", 1), ("other", 2)):
        found = frozen_version(settings(tmp_path, named), other.store, None)
        assert found == Opponent.of(read_commit(other, step).version_out)
        assert str(found) == f"other@{step}"
    assert (
        frozen_version(
            settings(tmp_path, "start", "episodes=null", "rewards.functions=[{kind: math}]"),
            other.store,
            None,
        )
        is None
    )


@pytest.mark.parametrize(
    ("version", "words", "said"),
    [
        ("other@7", (), r"episodes.opponent.version = other@7: .* has no committed step 7"),
        ("nobody", (), r"episodes.opponent.version = nobody: Run nobody has no committed step"),
        (
            "other@1",
            ("model.layers=3",),
            r"version = other@1 does not fit the model: it has 2 layers .* the policy has 3 layers",
        ),
        ("models:/other@champion", (), r"no version of model other has the alias champion"),
    ],
)
def test_what_cannot_be_is_said(
    tmp_path: Path, version: str, words: tuple[str, ...], said: str
) -> None:
    other = made(tmp_path, "other")
    with pytest.raises(ConfigError, match=said):
        frozen_version(settings(tmp_path, version, *words), other.store, None)


def test_an_opponent_of_another_family_does_not_fit(tmp_path: Path) -> None:
    other = made(tmp_path, "other")
    model = f"model={{kind: pretrained, path: {make('Gemma 2', tmp_path / 'model')}}}"
    said = "does not fit .* the policy has 4 layers with 2 heads of 32, and 256 tokens"
    with pytest.raises(ConfigError, match=said):
        frozen_version(settings(tmp_path, "other@1", model), other.store, None)


def fork_of(parent: RunStore) -> Origin:
    return begin_at(parent, 2, fork=True)


def test_a_fork_has_its_parents_opponent(tmp_path: Path) -> None:
    """That the alias of a version may name another one by now changes nothing."""
    other = made(tmp_path, "other")
    first = Opponent.of(read_commit(other, 1).version_in)
    parent = made(tmp_path, "parent", "other@2", **{FIELD: first.model_dump(mode="json")})
    same = settings(tmp_path, "other@2")
    assert frozen_version(same, parent.store, fork_of(parent)) == first
    own = frozen_version(settings(tmp_path), other.store, fork_of(other))
    assert own == Opponent.of(read_commit(other, 1).version_in), "not that with which it begins"
    changed = frozen_version(settings(tmp_path, "other@1"), parent.store, fork_of(parent))
    assert str(changed) == "other@1"
    assert frozen_version(settings(tmp_path), parent.store, fork_of(parent)) is None


def test_a_parents_opponent_that_is_gone_is_said(tmp_path: Path) -> None:
    other = made(tmp_path, "other")
    origin = fork_of(other)
    other.store.delete(other.store.list(other.weights_key(0)))
    with pytest.raises(ConfigError, match=r"opponent of other, other@0, is no longer in the store"):
        frozen_version(settings(tmp_path), other.store, origin)
