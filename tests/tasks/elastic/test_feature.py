"""What elastic training adds to a run: an aggregator, and gradients that are tidied up."""

from __future__ import annotations

from pathlib import Path

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.gradients import gradients_key
from storage.runs.run_store import RunStore
from tasks.run.features import features_of, tidy
from tasks.run.roles import roles_of
from tests.tasks.memory.settings import plan


def config_of(*words: str) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", ["train.engine=elastic", *words])


def test_only_runs_whose_workers_come_and_go_use_it() -> None:
    assert config_of().features == ("elastic",)
    assert features_of(load_recipe(GRPOConfig, "tiny", [])) == []


def test_its_roles_are_those_of_any_run() -> None:
    names = [role.name for role in roles_of(config_of())]
    assert {"reward", "rollout", "actor"} <= set(names)
    assert set(config_of().engine_roles) <= set(names)


def test_the_aggregator_is_in_the_memory_plan() -> None:
    lines = {line.partition(",")[0]: line for line in plan(config_of())}
    assert lines["aggregator"].startswith("aggregator, its rank: holds weights")
    assert lines["actor"].startswith("actor, each worker: holds weights")


def test_gradients_of_committed_steps_go(tmp_path: Path) -> None:
    files = RunStore(Store(f"file://{tmp_path}"), "run")
    for step in (1, 2):
        files.store.write(f"{gradients_key(files, step)}/{step:06d}.0-key/00000.json", b"{}")
    (gone,) = tidy(config_of(), files, 1)
    assert gone.startswith(gradients_key(files, 1))
    assert tidy(config_of(), files, 1) == []
    assert tidy(load_recipe(GRPOConfig, "tiny", []), files, 2) == []
