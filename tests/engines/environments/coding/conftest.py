"""Rows of the ten small repositories of examples/coding_tasks.py, in a cache of their own."""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.coding import CodingSource, WorkspaceConfig
from configs.rewards import ProcessSandbox
from engines.environments.coding.workspace import Workspace
from engines.sandboxes.opening import open_sandbox
from engines.sandboxes.protocol import SandboxFailed
from storage.objects.documents import Row
from storage.prompts.datasets import open_source
from tests.flows.conftest import ROOT

SETTINGS = WorkspaceConfig(
    sandbox=ProcessSandbox(memory_mib=512, processes=32, disk_mib=16, timeout=20.0),
    test_timeout=40.0,
)
EXAMPLE = runpy.run_path(str(ROOT / "examples/coding_tasks.py"))
TASKS: dict[str, Any] = EXAMPLE["TASKS"]
Open = Callable[..., Workspace]
SYSTEM = "/usr/bin/python3"  # on most machines without pytest
WITHOUT_PYTEST = (
    os.path.exists(SYSTEM)
    and subprocess.run([SYSTEM, "-I", "-c", "import pytest"], capture_output=True).returncode == 1
)


@pytest.fixture(scope="session")
def tasks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    EXAMPLE["write"](folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of trees; the same for all tests, which are opened once in a process."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def rows(tasks_folder: Path, cache: Path) -> dict[str, Row]:
    source = open_source(CodingSource(path=str(tasks_folder / "rows.jsonl")))
    return dict(zip(TASKS, source.rows(range(len(source))), strict=True))


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens workspaces that end with the test."""
    made: list[Workspace] = []
    try:
        open_sandbox(SETTINGS.sandbox).close()
    except SandboxFailed as error:
        pytest.skip(str(error))

    def make(row: Row, **changes: Any) -> Workspace:
        made.append(Workspace(SETTINGS.model_copy(update=changes), row))
        return made[-1]

    yield make
    for one in made:
        one.close()
