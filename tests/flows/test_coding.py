"""Coding tasks in the real flow: the tests of repositories are the reward, whoever dies."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.audit.audit import audit
from tests.examples.test_start_pages import Reader
from tests.faults.ledger import committed
from tests.faults.planted import Fault
from tests.flows.conftest import ROOT, Launch, Launched, ends_alike, starting
from tests.storage.prompts.coding.test_task_folders import BENCH, HARBOR

pytestmark = pytest.mark.cluster

EXAMPLES = ROOT / "examples"
WORDS = (
    f"{EXAMPLES}/coding.yaml",
    f"episodes.environment.path={EXAMPLES}/coding_agent.py:choose",
    "data.source.path=tasks/rows.jsonl",
    "episodes.max_turns=1",
    "episodes.max_turn_tokens=1",
    "rollout.max_new_tokens=8",
    "group_size=4",
    "store.snapshot_every=1",
    "cluster.no_workers_timeout=40",
    "name=coding",
)


def with_tasks(folder: Path) -> Path:
    runpy.run_path(str(EXAMPLES / "coding_tasks.py"))["write"](folder / "tasks")
    return folder


@pytest.fixture(scope="module")
def whole(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder = with_tasks(tmp_path_factory.mktemp("whole"))
    with starting(folder, prefect_api) as start:
        yield start(*WORDS).whole()


@pytest.mark.slow
def test_what_the_tests_say_is_the_reward(whole: Launched) -> None:
    """1 for a sample whose letter chose the right edit, else 0; and nothing is left behind."""
    first, second = committed(whole.files)
    for commit in (first, second):
        samples = commit.refs["samples"]
        rewards = samples.fetch_list(whole.files.store, "reward")
        assert {*rewards} == {0.0, 1.0}
        assert {*samples.fetch_list(whole.files.store, "episode_error")} == {""}
    assert first.version_out.digest != second.version_out.digest
    assert audit(whole.files).problems == []
    assert whole.children() == []


KILLS = {
    "environment": Fault(
        id="environment", target="engines.environments.child:Sessions.answer", nth=9, action="kill"
    ),
    "flow": Fault(id="flow", target="tasks.episodes:go_on", nth=5, action="kill"),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
def test_killed_in_mid_episode(launch: Launch, whole: Launched, tmp_path: Path, who: str) -> None:
    run = ends_alike(whole, launch, with_tasks(tmp_path), WORDS, KILLS[who])
    assert run.children() == []


@pytest.mark.slow
def test_the_page(prefect_api: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    reader = Reader(tmp_path / "empty", prefect_api)
    assert "no token trained: the rewards of each group are equal" in reader.follow(
        "coding-tasks.md"
    )
    assert {*reader.rewards()} == {0.0}


@pytest.mark.slow
def test_a_check_names_the_tasks_that_are_left_out(launch: Launch, tmp_path: Path) -> None:
    """Of task folders; one of each kind runs, and its tests are tried."""
    odd = {**HARBOR, "environment/Dockerfile": "FROM golang:1.22\nWORKDIR /app\n"}
    files = {
        f"tasks/{name}/{path}": text
        for name, task in (("bench", BENCH), ("harbor", HARBOR), ("odd", odd))
        for path, text in task.items()
    }
    words = [one for one in WORDS if not one.startswith(("data.source", "episodes.environment"))]
    words += [
        "data.source.path=tasks",
        f"episodes.environment.path={EXAMPLES}/coding_agent.py:solve",
    ]
    code, out = launch(*words, "--check", files=files).end()
    assert code == 0, out
    assert "odd is left out: it needs the image golang:1.22." in out
    assert "2 of 3 task folders run" in out
    assert "the tests of 2 rows fail before a change, as they have to" in out
