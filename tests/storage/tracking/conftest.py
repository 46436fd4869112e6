"""An MLflow on SQLite for each module."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.storage import TrackingConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracking")


@pytest.fixture
def config(folder: Path) -> TrackingConfig:
    return TrackingConfig(uri=f"sqlite:///{folder}/deep/mlflow.db")
