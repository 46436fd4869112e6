"""A run's engines, looked at from outside."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from engines.failures import ClusterLost
from tasks.run import engines
from tasks.run.engines import Engines, Opened
from tasks.run.machinery import Work


def test_a_look_at_a_cluster_that_is_closed_meanwhile_sees_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run: Any = SimpleNamespace(config=load_recipe(GRPOConfig, "tiny", []), name="run")
    looked = Engines(run)
    assert looked.at_work() == Work(), "workers start"
    looked._opened = Future()
    looked._opened.set_result(Opened(cluster=SimpleNamespace(), clients={}))  # type: ignore[arg-type]

    def closed(*_: object) -> Any:
        raise ClusterLost("the cluster has been closed")

    monkeypatch.setattr(engines, "running_calls", closed)
    assert looked.at_work() == Work()
