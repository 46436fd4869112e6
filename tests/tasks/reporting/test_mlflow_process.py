"""Pages in MLflow written by a process of their own, which may be killed."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.storage import TrackingConfig
from storage.tracking.connection import TrackingError
from storage.tracking.tracker import Tracker
from tasks.reporting import mlflow_process
from tasks.reporting.mlflow_process import PageWriter
from tests.storage.tracking.test_tracker import client, page
from tests.tasks.reporting.versions import published


@pytest.fixture
def config(tmp_path: Path) -> Iterator[TrackingConfig]:
    mlflow_process.SHARED.stop()
    yield TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db")
    mlflow_process.SHARED.stop()


def _own() -> list[psutil.Process]:
    """The processes that this one has for MLflow."""
    program = "tasks.reporting.mlflow_process"
    found = []
    for one in psutil.Process().children():
        with contextlib.suppress(
            psutil.NoSuchProcess
        ):  # one that a test has killed may be a zombie
            if any(program in word for word in one.cmdline()):
                found.append(one)
    return found


def metrics_of(config: TrackingConfig, run: str) -> dict[str, list[tuple[int, float]]]:
    """Metric -> (step, value) of a run's page."""
    mlflow = client(config)
    experiment = mlflow.get_experiment_by_name(config.experiment)
    (found,) = [
        one
        for one in mlflow.search_runs([experiment.experiment_id])
        if one.data.tags["refrain.run"] == run
    ]
    return {
        name: [(one.step, one.value) for one in mlflow.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
        if not name.startswith("system/")
    }


def test_a_page_is_written_without_mlflow_in_this_process(
    config: TrackingConfig, tmp_path: Path
) -> None:
    store, ref = published(tmp_path)
    code = f"""
import sys
from tasks.reporting.mlflow_process import PageWriter
from storage.tracking.tracker import Tracker
from configs.storage import TrackingConfig
from tests.storage.tracking.test_tracker import page
writer = PageWriter(TrackingConfig(uri={config.uri!r}))
writer.start(page("quiet"))
writer.call(Tracker.log_step, 1, {{"reward/mean": 0.5}}, at=1000.0)
number = writer.call(Tracker.register_version, 0, uri={store.url(ref.key)!r}, digest={ref.digest!r}, step=1, store_uri={store.uri!r}
)
writer.call(Tracker.log_file, "plots/a.txt", "text")
writer.call(Tracker.tag, "seen", "yes")
print(writer.link, writer.last_step, writer.model_name, number, writer.call(Tracker.registered))
writer.call(Tracker.finish)
assert not [name for name in sys.modules if name.partition(".")[0] in ("mlflow", "sqlalchemy")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert done.stdout.strip().endswith("?workflowType=machine_learning 1 tiny 1 {0: '1'}")
    assert metrics_of(config, "quiet")["reward/mean"] == [(1, 0.5)]
    (run,) = client(config).search_runs(["1"])
    assert (run.info.status, run.data.tags["seen"]) == ("FINISHED", "yes")


@pytest.mark.parametrize(
    "when", [pytest.param("between calls", marks=pytest.mark.slow), "in a call"]
)
def test_a_killed_process_loses_nothing(
    config: TrackingConfig, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PageWriter(config)
    writer.start(page("killed"))
    writer.call(Tracker.log_step, 1, {"reward/mean": 0.1}, at=1000.0)
    (process,) = _own()
    if when == "between calls":
        process.kill()
        psutil.wait_procs([process], timeout=10)
    else:
        process.suspend()  # it cannot answer
        asked = PageWriter._asked

        def killed(self: PageWriter, method: str, *given: Any) -> Any:
            pid, again = process.pid, psutil.pid_exists(process.pid)
            if again:
                subprocess.Popen(
                    [sys.executable, "-c", f"import os, time; time.sleep(1); os.kill({pid}, 9)"]
                )
            return asked(self, method, *given)

        monkeypatch.setattr(PageWriter, "_asked", killed)
    writer.call(Tracker.log_step, 2, {"reward/mean": 0.2}, at=1001.0)
    assert writer.last_step == 2
    writer.call(Tracker.finish)
    assert [one.pid for one in _own()] != [process.pid]
    assert metrics_of(config, "killed")["reward/mean"] == [(1, 0.1), (2, 0.2)]
    (run,) = client(config).search_runs(["1"])
    assert run.info.status == "FINISHED"


def test_a_process_that_dies_again_and_again_is_said(
    config: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PageWriter(config)
    writer.start(page("hopeless"))
    asked = PageWriter._asked

    def killed(self: PageWriter, method: str, *given: Any) -> Any:
        for process in _own():
            os.kill(process.pid, signal.SIGSTOP)
        monkeypatch.setattr(mlflow_process, "DEADLINE", 0.2)
        return asked(self, method, *given)

    monkeypatch.setattr(PageWriter, "_asked", killed)
    with pytest.raises(TrackingError, match=r"was not written to: tag took longer than 0\.2 s"):
        writer.call(Tracker.tag, "a", "b")


def test_what_mlflow_refuses_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tracking\.uri is mlruns"):
        PageWriter(TrackingConfig(uri="mlruns"))
    away = PageWriter(TrackingConfig(uri="http://127.0.0.1:9"))
    with pytest.raises(TrackingError, match="does not answer"):
        away.start(page())
    with pytest.raises(TrackingError, match="does not answer"):  # not that it never started
        away.call(Tracker.finish, "FAILED")


def test_people_are_told_what_is_waited_for(
    config: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_process, "TOLD_AFTER", 0.1)  # MLflow's import takes longer
    monkeypatch.setattr(mlflow_process, "EVERY", 0.1)
    told: list[str] = []
    PageWriter(config, told.append).start(page("slow"))
    assert len(told) > 1 and len({*told}) == 1, "again and again, as long as it lasts"
    clock = r"\d\d:\d\d:\d\d"
    since, until = re.fullmatch(
        rf"MLflow at {config.uri} has not answered since ({clock}) \(start\)\. It is waited for until "
        rf"({clock})\.",
        told[0],
    ).groups()  # type: ignore[union-attr]
    began, ends = (datetime.datetime.strptime(one, "%H:%M:%S") for one in (since, until))
    assert (ends - began).total_seconds() % 86400 == 2 * mlflow_process.DEADLINE
    monkeypatch.setattr(mlflow_process, "TOLD_AFTER", 60.0)
    quick: list[str] = []
    PageWriter(config, quick.append).start(page("quick"))
    assert not quick


def test_runs_share_a_process_until_what_is_set_for_mlflow_changes(
    config: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = PageWriter(config), PageWriter(config)
    first.start(page("first"))
    second.start(page("second"))
    assert len(_own()) == 1
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a")
    second.call(Tracker.log_step, 1, {"reward/mean": 0.2}, at=1000.0)
    first.call(Tracker.log_step, 1, {"reward/mean": 0.1}, at=1000.0)
    assert metrics_of(config, "first")["reward/mean"] == [(1, 0.1)]
    assert metrics_of(config, "second")["reward/mean"] == [(1, 0.2)]
    (only,) = _own()
    assert only.environ()["MLFLOW_TRACKING_TOKEN"] == "a"
