"""What is said before processes start where they could not."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters.opening import check_cluster, open_cluster
from engines.processes.process_setup import check_shared_memory
from tests.engines.conftest import one_pool_roles


def test_shared_memory_that_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_shared_memory()
    check_shared_memory(str(tmp_path / "none"))  # not Linux

    def full(folder: str) -> SimpleNamespace:
        return SimpleNamespace(f_frsize=4096, f_bavail=8, f_blocks=16384)

    monkeypatch.setattr(os, "statvfs", full)
    config = ClusterConfig(pools={"one": PoolConfig()}, roles=one_pool_roles("one"))
    for begin in (check_shared_memory, lambda: check_cluster(config), lambda: open_cluster(config)):
        with pytest.raises(ValueError, match=r"/dev/shm has 0\.0312 MiB free of 64, and") as error:
            begin()
        assert str(error.value).count(". ") == 1 and "--shm-size" in str(error.value)
