"""Settings of the cluster that contradict each other."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.cluster import ClusterConfig, PoolConfig


def test_a_dashboard_is_of_a_scheduler_that_the_run_starts() -> None:
    assert ClusterConfig(dashboard="127.0.0.1:8787").dashboard == "127.0.0.1:8787"
    with pytest.raises(ValidationError, match=r"with cluster\.kind = address it starts none"):
        ClusterConfig(kind="address", address="tcp://host:1", dashboard="127.0.0.1:8787")
    with pytest.raises(ValidationError, match="dashboard"):
        ClusterConfig(dashboard="8787")


def test_a_price_is_not_negative() -> None:
    with pytest.raises(ValidationError, match="price_per_hour"):
        PoolConfig(price_per_hour=-1.0)
