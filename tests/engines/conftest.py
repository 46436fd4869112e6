"""Processes: waiting for them to end, and clusters to test with."""

import os
import time

import psutil
import pytest

from configs.cluster import ClusterConfig, PoolConfig, RolesConfig
from engines.clusters.opening import open_cluster


def one_pool_roles(pool):
    return RolesConfig(actor=pool, ref=pool, rollout=pool, reward=pool)


def alive(pids):
    """Those of `pids` that still run (a zombie does not)."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def left_after(seconds, pids):
    """What of `pids` has not ended in time; ends it, so that no test leaves anything behind."""
    until = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < until:
        time.sleep(0.02)
    descriptions = [f"{pid} {psutil.Process(pid).cmdline()}" for pid in left]
    for pid in left:
        os.kill(pid, 9)
    return descriptions


@pytest.fixture(scope="package")
def cluster():
    """Two pools; tests may kill workers, but leave all of them alive or on their way back."""
    config = ClusterConfig(
        pools={"pair": PoolConfig(workers=2, slots=2), "solo": PoolConfig(threads=2, slots=1)},
        roles=one_pool_roles("pair"),
        no_workers_timeout=30.0,
    )
    with open_cluster(config, {"pair": {"REFRAIN_TEST": "from the caller"}}) as cluster:
        yield cluster


@pytest.fixture
def pair(cluster):
    """Addresses of the pool "pair", complete."""
    return list(cluster.wait("pair", 2).values())


@pytest.fixture
def solo(cluster):
    """Address of the worker of the pool "solo"."""
    return next(iter(cluster.wait("solo").values()))
