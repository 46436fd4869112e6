"""Stores for the tests of what is kept in them; tests/contract has the stores themselves."""

import uuid
from pathlib import Path

import pytest

from storage.objects.store import Store
from storage.runs.run_store import RunStore


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


@pytest.fixture
def memory() -> Store:
    return Store(f"memory://{uuid.uuid4().hex[:8]}")


@pytest.fixture
def run(store: Store) -> RunStore:
    return RunStore(store, "run")
