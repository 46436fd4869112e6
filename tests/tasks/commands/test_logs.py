"""Which log of a run is shown, and what is said where there is none here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.objects.store import Store
from storage.runs.live import Live, write_live
from storage.runs.run_store import RunStore
from tasks.commands.logs import log_of


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.chdir(tmp_path)
    return RunStore(Store(f"file://{tmp_path}/store"), "run-1")


def live(run: RunStore, **other: str | None) -> None:
    known = {"scheduler": "tcp://h:1", "prefect": None, "flow_run": None, "epoch": 1}
    write_live(run, Live.model_validate({**known, **other}))


def test_logs_are_where_the_flow_said_wherever_one_asks(run: RunStore, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    live(run, host=os.uname().nodename, logs=str(folder))
    for name in ("flow.log", "workers.log"):
        (folder / name).touch()
    assert log_of(run, False, None) == folder / "flow.log"
    assert log_of(run, True, None) == folder / "workers.log"


def test_a_run_that_failed_before_its_workers_came_has_a_log_in_the_working_folder(
    run: RunStore,
) -> None:
    folder = Path(".refrain/logs/run-1")
    folder.mkdir(parents=True)
    (folder / "flow.log").touch()
    assert log_of(run, False, None) == folder.absolute() / "flow.log"


def test_workers_of_slurm_have_files_of_their_own(run: RunStore, tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "rollout-0.log").touch()
    live(run, host=os.uname().nodename, logs=str(tmp_path), worker_logs=str(folder))
    assert log_of(run, False, "rollout-0") == folder / "rollout-0.log"
    for workers, worker in ((True, None), (False, "rollout-7")):
        with pytest.raises(ValueError, match="Name one with --worker: rollout-0"):
            log_of(run, workers, worker)


@pytest.mark.parametrize(
    ("other", "worker", "said"),
    [
        ({}, None, "the run said nothing yet"),
        (
            {"host": "another", "logs": "/there"},
            None,
            "ran on another, and its logs are there in /there",
        ),
        ({}, "rollout-0", "have no files of their own. Ask for --workers"),
    ],
)
def test_where_there_is_none_it_is_said_why(
    run: RunStore, other: dict[str, str], worker: str | None, said: str
) -> None:
    live(run, **other)
    with pytest.raises(ValueError, match=said):
        log_of(run, False, worker)
