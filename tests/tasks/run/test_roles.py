"""Roles of engines: what the table says of every run, and one more role, opened, called and closed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from tasks.run import roles
from tasks.run.contract import Clients, EngineRole
from tasks.run.engines import Engines
from tasks.run.roles import ACTOR, OPPONENT, ROLLOUT, SCORER, roles_of, variables_of
from tests.configs.flow_settings import of_flows

TEACHER = "teachers.tutor.model={kind: random, seed: 1}"
KINDS = of_flows()
RUNS = {
    "grpo": ("GRPOConfig", []),
    "reference": ("GRPOConfig", ["algorithm.kl.coefficient=0.1"]),
    "ppo": ("PPOConfig", ["algorithm.advantage={kind: gae}"]),
    "tree": ("TreeConfig", []),
    "distill": ("DistillConfig", [TEACHER]),
    "srpo": ("SRPOConfig", []),
}
RUNS = {name: given for name, given in RUNS.items() if given[0] in KINDS}


def config_of(name: str) -> GRPOConfig:
    kind, words = RUNS[name]
    return load_recipe(KINDS[kind], "tiny-srpo" if name == "srpo" else "tiny", words)


@pytest.mark.parametrize("name", RUNS)
def test_every_role_that_the_settings_give_a_pool_has_a_record(name: str) -> None:
    config = config_of(name)
    names = [role.name for role in roles_of(config)]
    assert len(set(names)) == len(names)
    assert set(config.engine_roles) <= set(names)
    assert {"reward", "rollout", "actor"} <= set(names)
    assert all(
        role.start is not None for role in roles_of(config) if role.name in config.engine_roles
    )


def test_a_role_brings_the_variables_of_its_workers() -> None:
    config = load_recipe(GRPOConfig, "tiny", ["rollout.engine=vllm"])
    pool = config.cluster.roles.rollout
    assert variables_of(config) == {pool: dict(ROLLOUT.variables(config)[pool])}
    assert OPPONENT.variables(config) == {}


def test_a_role_that_nothing_needs_is_named() -> None:
    with pytest.raises(LookupError, match="no engines of role 'opponent': nothing needs them"):
        Clients({SCORER: object()})[OPPONENT]
    assert Clients({SCORER: object()}).get(OPPONENT) is None


class Cache:
    """The client of a role that a test adds."""

    def __init__(self) -> None:
        self.told: list[str] = []


CACHE: EngineRole[Cache] = EngineRole(
    name="cache",
    needed=lambda config: config.episodes is None,
    client=lambda run, cluster: Cache(),
    start=lambda engines, cache: cache.told.append(f"started beside {engines.run.name}"),
    close=lambda cache: cache.told.append("closed"),
)


def a_run() -> Any:
    return SimpleNamespace(
        name="r",
        config=config_of("grpo"),
        tell=lambda event: None,
        cancelled=threading.Event(),
    )


def test_a_new_role_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = EngineRole(
        name="actor", needed=lambda config: True, client=lambda run, cluster: Cache()
    )
    monkeypatch.setattr(roles, "ROLES", (CACHE, plain))
    closed: list[str] = []
    cluster: Any = SimpleNamespace(
        close=lambda: closed.append("cluster"), outages=SimpleNamespace()
    )
    engines = Engines(a_run())
    assert engines.starting == ["cache"]
    engines.launch(cluster)
    engines.wait("cache")
    assert engines[CACHE].told == ["started beside r"]
    assert engines.get(ACTOR) is None
    engines.close()
    assert closed == ["cluster"]
    assert engines[CACHE].told[-1] == "closed"


def test_a_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def start(engines: object, client: object) -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise RuntimeError("not yet")

    weak: EngineRole[Cache] = EngineRole(
        name="weak",
        needed=lambda config: True,
        client=lambda run, cluster: Cache(),
        start=start,
    )
    monkeypatch.setattr(roles, "ROLES", (weak,))
    cluster: Any = SimpleNamespace(close=lambda: None, outages=SimpleNamespace())
    engines = Engines(a_run())
    engines.launch(cluster)
    with pytest.raises(RuntimeError, match="not yet"):
        engines.wait("weak")
    engines.wait("weak")
    assert tries == [0, 1]
    engines.close()
