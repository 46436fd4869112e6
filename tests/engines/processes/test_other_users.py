"""Who else is on a machine, by the owners of its processes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from engines.processes.process_tree import other_people
from tasks.run import preflight


def processes(folder: Path, *users: int) -> Path:
    """A folder like /proc with a process of each of these users."""
    for number, user in enumerate(users, start=1):
        (folder / str(number)).mkdir()
        os.chown(folder / str(number), user, user)
    (folder / "self").mkdir()
    (folder / "meminfo").touch()
    return folder


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_people_count_and_services_do_not(tmp_path: Path) -> None:
    folder = processes(tmp_path, 0, 33, 999, 65534, 4321, 4321, 54321, os.getuid())
    assert other_people(folder) == ["4321", "54321"]
    assert other_people(tmp_path / "gone") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_a_process_of_another_is_seen() -> None:
    assert "4321" not in other_people()
    process = subprocess.Popen(["sleep", "60"], user=4321, cwd="/")
    try:
        time.sleep(0.5)
        assert "4321" in other_people()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("words", "people", "said"),
    [
        ([], [], None),
        ([], ["eve"], "eve can reach what this run opens"),
        ([], ["ann", "eve"], "Set cluster.shared_machine = true"),
        (["cluster.shared_machine=true"], ["eve"], None),
        (["cluster.tls.kind=temporary"], ["eve"], None),
        (
            ["cluster.shared_machine=true", "cluster.pools.train.workers=2"],
            ["eve"],
            "the 2 ranks of this machine meet",
        ),
        (["cluster.tls={kind: 'off'}", "cluster.shared_machine=true"], ["eve"], "eve can reach"),
    ],
)
def test_a_run_warns_of_them(
    words: list[str], people: list[str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "other_people", lambda: people)
    findings = preflight._check_neighbours(load_recipe(GRPOConfig, "tiny", words))
    assert [one.warning for one in findings] == [True] * (said is not None)
    assert said is None or said in findings[0].found


def test_one_setting_closes_the_cluster() -> None:
    made = load_recipe(GRPOConfig, "tiny", ["cluster.shared_machine=true"]).cluster
    assert made.encryption.kind == "temporary"
