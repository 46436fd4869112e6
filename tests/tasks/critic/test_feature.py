"""What a critic adds to a run: its ranks, which are planned and checked as the policy's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.grpo import GRPOConfig
from configs.ppo import PPOConfig
from configs.recipe import load_recipe
from tasks.critic.role import CRITIC
from tasks.memory import check as memory
from tasks.run.contract import Clients
from tasks.run.engines import Engines
from tasks.run.features import PreflightError
from tasks.run.preflight import check
from tasks.run.roles import ACTOR, roles_of
from tests.tasks.memory.settings import plan


def config_of(*words: str) -> PPOConfig:
    return load_recipe(PPOConfig, "tiny", list(words))


def test_only_ppo_has_it() -> None:
    assert config_of().features == ("critic",)
    assert CRITIC in roles_of(config_of())
    assert CRITIC not in roles_of(load_recipe(GRPOConfig, "tiny", []))


def test_the_policy_is_the_last_that_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """What retention keeps goes by its snapshots, so those of others are written before."""
    run: Any = SimpleNamespace(config=config_of())
    monkeypatch.setattr(Engines, "clients", Clients({ACTOR: "actor", CRITIC: "critic"}))
    assert Engines(run).trained == ["critic", "actor"]


def test_it_is_in_the_memory_plan() -> None:
    assert any(line.startswith("critic, ") for line in plan(config_of()))


def test_beside_an_adapter_all_its_weights_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(memory, "sizes_of", lambda *given: asked.append(given))
    plan(config_of("lora.rank=4"))
    ((*_, lora),) = asked
    assert lora is None


def test_its_rank_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    words = ["cluster.pools.critic={gpus: 2}", "cluster.roles.critic=critic"]
    with pytest.raises(PreflightError, match="the role critic is one FSDP rank"):
        check(config_of(f"store.uri={tmp_path}/store", *words))
