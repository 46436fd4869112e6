"""Fixtures that several folders of tests use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import slurm as slurm_daemons
from tests.slurm import Slurm, running_slurm

# Millions of objects of torch, transformers and Prefect stay to the end: a collection that looks at
# them takes a second, and each train engine that is closed makes one.
gc.disable()  # while all test modules are imported

hypothesis.settings.register_profile("refrain", deadline=None)  # on a busy machine all is slow
hypothesis.settings.load_profile("refrain")

TESTS = Path(__file__).parent
LONG_FIRST = ("flows", "deploy", "examples", "faults", "contract")
LONG_FILES = ("test_preflight.py", "test_tracing.py", "test_expert_parallel.py", "test_sessions.py")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For products so small that threads take longer, and rows round by their threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: what is left for several processes at the end is short then."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in LONG_FIRST:
            return LONG_FIRST.index(folder)
        return len(LONG_FIRST) + (item.path.name not in LONG_FILES)

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for reference cycles again."""
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test's collections look at what it makes, and not at the libraries imported before it."""
    gc.freeze()


@pytest.fixture(scope="session")
def slurm_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A real Slurm on this machine."""
    if missing := slurm_daemons.missing():
        pytest.skip(
            f"Slurm is not installed: no {', '.join(missing)} (apt install slurm-wlm munge)"
        )
    with running_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def slurm(slurm_daemon: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """The same, for this process and what it starts; without jobs at the end."""
    for name, value in slurm_daemon.environment.items():
        monkeypatch.setenv(name, value)
    yield slurm_daemon
    slurm_daemon.clear()
