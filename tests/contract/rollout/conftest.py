"""One tiny world and one engine of each kind for all tests of the rollout contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from engines.rollout.engine import RolloutEngine
from tests.contract.rollout.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("rollout"))


@pytest.fixture(scope="session")
def built(world: World) -> Iterator[Callable[[str], RolloutEngine]]:
    """The one engine of a kind; built when first asked for, and again when a test has ended it."""
    engines: dict[str, RolloutEngine] = {}
    pids: set[int] = set()

    def get(kind: str) -> RolloutEngine:
        if kind not in engines or engines[kind].status().state in ("dead", "closed"):
            if kind.startswith("vllm"):
                pytest.importorskip("vllm")
            engines[kind] = world.build(kind)
            pids.update(engines[kind].status().pids)
        return engines[kind]

    yield get
    for engine in engines.values():
        engine.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


# What of vLLM waits for the slow suite: an engine of its own takes half a minute to start.
SLOW_WITH_VLLM = (
    "test_segments.py",
    "test_resumable_generation.py",
    "test_thinking_budget.py",
    "test_turns.py",
    "test_grammars.py",
    "test_weight_transfer.py",
)


@pytest.hookimpl(tryfirst=True)  # before the slow ones are taken out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW_WITH_VLLM and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.slow)


KINDS = [
    "transformers",
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("vllm-own", marks=[pytest.mark.vllm, pytest.mark.slow]),
]


@pytest.fixture(params=KINDS)
def engine(
    request: pytest.FixtureRequest, built: Callable[[str], RolloutEngine], world: World
) -> RolloutEngine:
    """An engine of each kind that holds version 0 and has nothing in flight."""
    found = built(request.param)
    if found.version != 0:
        found.sync(world.weights[0])
    return found


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool
