"""The engine, role, task, feature and listener of docs/extending.md, run as they stand there."""

from __future__ import annotations

import dataclasses
import sys
import threading
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from engines.models.traced_shape import Shape
from engines.workers.devices import DeviceTime
from engines.workers.engine import CallId, Engine, EngineSpec, StoreSpec
from engines.workers.pool import EnginePool
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import key_of
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.memory.holders import WorkerEngine
from tasks.results import Scored
from tasks.run import features, roles
from tasks.run.attempts import Attempt, AttemptLog
from tasks.run.contract import EngineRole, pool_of, start_pool
from tasks.run.engines import Engines
from tasks.run.events import Listeners, StepCommitted
from tasks.run.facts import RunFacts
from tasks.run.features import Feature, Finding, features_of
from tasks.run.preflight import check_settings
from tasks.run.roles import store_spec
from tasks.run.run import Run
from tasks.run.stage import OPTIONS, Stage
from tests.examples.pages import blocks_of


def page(begins: str) -> str:
    """The page's piece of Python with this beginning."""
    (found,) = (piece for piece in blocks_of("extending.md", "python") if begins in piece)
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Attempt, "log", lambda attempt: None)
    store = Store(str(tmp_path / "store"))
    return SimpleNamespace(
        name="r",
        config=load_recipe(GRPOConfig, "tiny"),
        store=store,
        files=RunStore(store, "r"),
        cancelled=threading.Event(),
        tell=lambda event: None,
        attempts=AttemptLog(),
        device_time=DeviceTime(),
        call_id=lambda step, call: CallId(run="r", epoch=1, step=step, call=call),
    )


@pytest.fixture
def names() -> dict[str, Any]:
    """What the page's engine, and the role of it, make of what they import."""
    of_ours = (BatchRef, Engine, EnginePool, EngineRole, EngineSpec, StoreSpec, store_spec, pool_of)
    names: dict[str, Any] = {each.__name__: each for each in (*of_ours, start_pool, write_batch)}
    names |= {"abstractmethod": abstractmethod, "np": np, "Caller": object, "Cluster": object}
    exec(page("class LengthCache"), names)
    exec(page("CACHE = "), names)
    return names


def test_the_role_is_opened_and_the_task_asks_it_once(
    run: Any, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(roles, "ROLES", (names["CACHE"],))
    monkeypatch.setattr(EnginePool, "start", lambda pool: started.append(pool.role))
    cluster: Any = SimpleNamespace(
        config=run.config.cluster,
        close=lambda: None,
        outages=SimpleNamespace(),
        known_workers=lambda pool: None,
    )
    run.engines = Engines(run)
    run.engines.launch(cluster)
    run.engines.wait("cache")
    assert started == ["cache"]
    assert run.engines[names["CACHE"]].pool == run.config.cluster.roles.reward

    asked: list[str] = []

    def call(pool: Any, method: Any, *who: Any, **arguments: Any) -> BatchRef:
        asked.append(method.__name__)
        engine = names["LengthCache"](pool.spec.payload)
        ref = getattr(engine, method.__name__)(**arguments)
        assert isinstance(ref, BatchRef)
        return ref

    monkeypatch.setattr(EnginePool, "call", call)
    names |= {
        "task": lambda **options: lambda function: function, "OPTIONS": OPTIONS, "Run": Run,
        "Stage": Stage, "Scored": Scored, "key_of": key_of, "replace": dataclasses.replace,
    }  # fmt: skip
    exec(page("def length("), names)
    texts = [np.arange(3), np.arange(5)]
    samples = write_batch(run.store, "r/samples.safetensors", {"response_ids": texts})
    scored = Scored(sampled=(), ref=samples, failures=0, code=(), seconds=0.0, metrics={})
    for _ in range(2):  # the second time it is found in the store
        made = names["length"](run, 1, scored, 1)
        assert made.ref.fetch_numpy(run.store, "length")[0].tolist() == [3, 5]
        assert "response_ids" in made.ref.names
    assert asked == ["look_up"]
    run.engines.close()


class CacheConfig(GRPOConfig):
    """Settings that use the page's feature."""

    @property
    def features(self) -> tuple[str, ...]:
        return (*super().features, "cache")


def test_the_feature_is_its_record_and_two_lines(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names |= {
        "Feature": Feature, "Finding": Finding, "WorkerEngine": WorkerEngine, "Holder": object,
        "Iterator": Iterator, "GRPOConfig": GRPOConfig, "Shape": Shape,
    }  # fmt: skip
    exec(page("FEATURE = "), names)
    room: Any = ModuleType("room_of_the_cache")
    room.FEATURE = names["FEATURE"]
    monkeypatch.setitem(sys.modules, "room_of_the_cache", room)
    monkeypatch.setitem(features.FEATURES, "cache", "room_of_the_cache:FEATURE")
    config = load_recipe(CacheConfig, "tiny", [])
    assert names["CACHE"] in roles.roles_of(config)
    assert names["CACHE"] not in roles.roles_of(load_recipe(GRPOConfig, "tiny", []))
    found = {one.found for one in check_settings(config)}
    assert "cache, each worker: lengths 0 MiB" in found
    (finding,) = (one for feature in features_of(config) for one in feature.check(config))
    assert finding.found == "lengths of 16 answers a step"


def test_the_listener_hears_of_each_step(tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "Listeners": Listeners, "Path": Path, "RunFacts": RunFacts, "StepCommitted": StepCommitted,
    }  # fmt: skip
    exec(page("class RewardFile"), names)
    facts, listeners = SimpleNamespace(name="r"), Listeners()
    names["RewardFile"](facts, tmp_path / "rewards.txt").listen(listeners)
    for step, reward in ((1, 0.25), (2, 0.5)):
        record: Any = SimpleNamespace(step=step)
        listeners.tell(
            StepCommitted(
                record=record,
                metrics={"reward/mean": reward},
                scored=[],
                attempts=[],
                snapshot=False,
            )
        )
    listeners.drain()
    assert (tmp_path / "rewards.txt").read_text().splitlines() == [
        "r step 1: reward 0.250",
        "r step 2: reward 0.500",
    ]
