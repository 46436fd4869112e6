"""What Weights & Biases, Trackio and TensorBoard keep of a run, read back from their own files.

Each is written by its real package, offline, in a process that may be killed.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage.tracking.connection import TrackerUnusable, TrackingError
from storage.tracking.curve_trackers import TRACKERS, CurvesOf, CurveTracker

WRITER = """
import os, sys
from storage.tracking.curve_trackers import TRACKERS, CurvesOf
kind, folder, last, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
tracker = TRACKERS[kind](folder)
tracker.start(CurvesOf(
    run="tiny-2", project="our/project", group="tiny",
    settings={"seed": 7, "data": {"prompt": "long " * 1000}},
    tags={"refrain.run": "tiny-2", "refrain.forked_from": "tiny-1", "mlflow.source.name": "x"},
))
print(tracker.last_step, "torch" in sys.modules)
for step in range((tracker.last_step or 0) + 1, last + 1):
    odd = {"näm e?[0]": float(step), "nan": float("nan"), "inf": float("inf")}
    tracker.log(step, {"reward/mean": step / 4, **odd}, at=1e9 + step)
if last == 5:
    tracker.log_evaluation(2, {"eval/math/accuracy": 0.5}, at=1e9)  # long after its step
if end == "dies":
    os.kill(os.getpid(), 9)
tracker.finish(end)
"""
NAMES = {"reward/mean", "näm e__0_"}  # as MLflow shows them (mlflow_entities.shown_name)


def write(kind: str, home: Path, last: int, end: str = "FINISHED") -> str:
    """What the tracker knew when it began, of a process that writes up to a step."""
    folders = {"WANDB_DIR": str(home), "TRACKIO_DIR": str(home / "trackio"), "HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", WRITER, kind, str(home / "tensorboard"), str(last), end],
        env={**os.environ, **folders, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == (-9 if end == "dies" else 0), done.stderr
    (known,) = [one for one in done.stdout.splitlines() if one.endswith(("True", "False"))]
    last_step, torch = known.split()
    assert torch == "False", "it takes a second and a gigabyte"
    return last_step


# (step, metrics) as they were logged, evaluations too, and the settings.
Kept = tuple[list[tuple[int, dict[str, float]]], dict[str, Any]]


def kept_by_wandb(home: Path) -> Kept:
    from storage.tracking.curve_trackers import records_of

    rows, settings = [], {}
    for file in sorted(home.glob("wandb/offline-run-*-tiny-2/run-tiny-2.wandb")):
        for one in records_of(file):
            if one.HasField("run"):
                assert (one.run.display_name, one.run.project) == ("tiny-2", "our-project")
                assert (one.run.run_group, one.run.notes) == ("tiny", "Fork of tiny-1")
                settings = {item.key: json.loads(item.value_json) for item in one.run.config.update}
            found = {"/".join(item.nested_key): item.value_json for item in one.history.item}
            row = {name: json.loads(value) for name, value in found.items() if name[0] != "_"}
            if row:
                step = row.pop("step", None)
                rows.append((row.pop("version", step), row))
    return rows, settings


def kept_by_trackio(home: Path) -> Kept:
    (file,) = home.glob("trackio/*.db")
    with closing(sqlite3.connect(file)) as database:
        rows = database.execute(
            "select step, run_name, metrics from metrics order by id"
        ).fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    assert {run for _, run, _ in rows} == {"tiny-2"}
    return [(step, json.loads(metrics)) for step, _, metrics in rows], json.loads(config)


def kept_by_tensorboard(home: Path) -> Kept:
    import yaml
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(home / "tensorboard/our_project/tiny-2"))
    events.Reload()
    rows: dict[tuple[bool, int], dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for one in events.Scalars(name):
            at = rows.setdefault((name.startswith("eval/"), one.step), {})
            assert name not in at, "a step shows twice"
            at[name] = one.value
    text = events.Tensors("settings")[-1].tensor_proto.string_val[0].decode()
    settings = yaml.safe_load(text.removeprefix("```yaml\n").removesuffix("```"))
    return [(step, row) for (_, step), row in rows.items()], settings


READ: dict[str, Callable[[Path], Kept]] = {
    "wandb": kept_by_wandb,
    "trackio": kept_by_trackio,
    "tensorboard": kept_by_tensorboard,
}
REAL = [
    pytest.param(kind, marks=pytest.mark.skipif(find_spec(kind) is None, reason=f"needs {kind}"))
    for kind in READ
]


@pytest.mark.parametrize("kind", REAL)
def test_a_run_that_goes_on_has_each_step_once(kind: str, tmp_path: Path) -> None:
    assert write(kind, tmp_path, 3) == "None"
    assert write(kind, tmp_path, 5) == "3"
    rows, settings = READ[kind](tmp_path)
    trained = [(step, row) for step, row in rows if "reward/mean" in row]
    assert [(step, row["reward/mean"]) for step, row in trained] == [
        (step, step / 4) for step in (1, 2, 3, 4, 5)
    ]
    assert all(row.keys() == NAMES and row["näm e__0_"] == step for step, row in trained)
    measured = [(step, row) for step, row in rows if "eval/math/accuracy" in row]
    assert measured == [(2, {"eval/math/accuracy": 0.5})]
    assert settings["seed"] == 7
    assert len(settings["data"]["prompt"]) == 500
    assert settings["refrain"] == {"run": "tiny-2", "forked_from": "tiny-1"}


@pytest.mark.parametrize("kind", REAL)
def test_what_a_killed_process_had_not_written_is_written_by_the_next(
    kind: str, tmp_path: Path
) -> None:
    write(kind, tmp_path, 3, "dies")
    write(kind, tmp_path, 5)
    trained = [step for step, row in READ[kind](tmp_path)[0] if "reward/mean" in row]
    assert trained == [1, 2, 3, 4, 5]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_hides_what_was_written_and_not_marked(tmp_path: Path) -> None:
    write("tensorboard", tmp_path, 3)
    (tmp_path / "tensorboard/our_project/tiny-2/refrain.last_step").write_text("2")
    assert write("tensorboard", tmp_path, 4) == "2"
    trained = [step for step, row in kept_by_tensorboard(tmp_path)[0] if "reward/mean" in row]
    assert trained == [1, 2, 3, 4]


BEGIN = """
import sys
from storage.tracking import curve_trackers
from storage.tracking.curve_trackers import TRACKERS, CurvesOf
curve_trackers.INIT_SECONDS = 2.0
run = CurvesOf(run="r", project="p", group="g", settings={}, tags={})
try:
    TRACKERS["wandb"]("").start(run)
except RuntimeError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", "TrackerUnusable Weights & Biases takes no run: No API key configured"),
        ("a" * 40, "TrackingError Weights & Biases does not answer: "),
    ],
)
def test_the_real_one_says_what_it_lacks(key: str, says: str, tmp_path: Path) -> None:
    """Of a server that takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = {"WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        given = {"WANDB_API_KEY": key, "WANDB_DIR": str(tmp_path), "HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", BEGIN],
            env={**os.environ, **there, **{name: v for name, v in given.items() if v}},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert any(line.startswith(says) for line in done.stdout.splitlines()), (
        done.stdout + done.stderr
    )


RUN = CurvesOf(run="tiny-2", project="p", group="tiny", settings={}, tags={})


class Page:
    """A run of Weights & Biases on its server."""

    offline, url = False, "https://wandb.ai/p/tiny-2"

    def __init__(self, summary: dict[str, int]) -> None:
        self.summary, self.resumed = summary, bool(summary)
        self.axes: list[tuple[str, str]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))


def server(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], Page]) -> CurveTracker:
    class Error(Exception):
        pass

    class CommError(Error):
        pass

    errors = SimpleNamespace(Error=Error, CommError=CommError)
    wandb = SimpleNamespace(
        errors=errors, Settings=SimpleNamespace, init=lambda **given: answer(errors)
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return TRACKERS["wandb"]("")


def test_a_server_says_with_which_step_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page({"step": 8, "version": 5})
    tracker = server(monkeypatch, lambda errors: page)
    tracker.start(RUN)
    assert (tracker.last_step, tracker.link) == (8, "https://wandb.ai/p/tiny-2")
    assert page.axes == [("*", "step"), ("eval/*", "version")]
    new = server(monkeypatch, lambda errors: Page({}))
    new.start(RUN)
    assert new.last_step is None


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        ("CommError", TrackingError, "Weights & Biases does not answer: connection refused"),
        ("Error", TrackerUnusable, "Weights & Biases takes no run: connection refused"),
    ],
)
def test_a_server_that_is_away_may_come_back_and_one_without_a_key_does_not(
    monkeypatch: pytest.MonkeyPatch, error: str, kind: type[Exception], says: str
) -> None:
    def refuse(errors: Any) -> Page:
        raise vars(errors)[error]("connection refused\nand much more")

    with pytest.raises(TrackingError, match=rf"^{says}\.$") as raised:
        server(monkeypatch, refuse).start(RUN)
    assert type(raised.value) is kind
