"""The curves of a past run as a table, and what Weights & Biases and Trackio are given.

Where they are installed they are asked themselves, offline; else stand-ins that are written by hand.
"""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import curves
from storage.objects.store import Store
from storage.runs.live import End, write_end
from storage.runs.run_store import RunStore
from tests.storage.audit import small_run

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(f"file://{tmp_path}/store")
    run, before = RunStore(store, "run"), None
    run.write_run({"config": {"seed": 1}, "code": "0.1.0", "flow": "flows.grpo:grpo"})
    for step, metrics in ((1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5, "train/loss": 0.1})):
        before = small_run.take(run, step, before, metrics=metrics, committed_at=1e9 + step)
    return store


def export(store: Store, monkeypatch: pytest.MonkeyPatch, *words: str, run: str = "run") -> int:
    monkeypatch.setattr(sys, "argv", ["curves", run, *words, f"store.uri={store.uri}"])
    return curves.main()


def test_a_table_has_a_line_for_each_step(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "run.csv"
    assert export(store, monkeypatch, "--to", "csv", "--file", str(place)) == 0
    first, second = csv.DictReader(place.read_text().splitlines())
    assert first == {
        "step": "1", "committed_at": "1000000001.0", "reward/mean": "0.25", "train/loss": "",
    }  # fmt: skip
    assert second["train/loss"] == "0.1"


class Wandb:
    """A page on a server that notes what it is told."""

    url, offline = "https://wandb.ai/refrain/run", False

    def __init__(self) -> None:
        self.begun: dict[str, Any] = {}
        self.logged: list[dict[str, float]] = []
        self.finished = 0
        self.errors, self.Settings = SimpleNamespace(), SimpleNamespace

    @property
    def summary(self) -> dict[str, float]:
        return self.logged[-1]

    @property
    def resumed(self) -> bool:
        return bool(self.logged)

    def init(self, **named: Any) -> Wandb:
        self.begun = named
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        """Nothing."""

    def log(self, metrics: dict[str, float]) -> None:
        self.logged.append(metrics)

    def finish(self, exit_code: int) -> None:
        self.finished += 1


def test_weights_and_biases_has_a_run_of_the_same_id_and_each_step_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", page)
    for _ in range(2):
        assert export(store, monkeypatch, "--to", "wandb", "--project", "p") == 0
    assert (page.begun["id"], page.begun["project"], page.begun["resume"]) == ("run", "p", "allow")
    assert page.begun["config"] == {"seed": 1, "refrain": {"run": "run"}}
    assert [(one["step"], one["reward/mean"]) for one in page.logged] == [(1, 0.25), (2, 0.5)]
    assert page.finished == 2
    assert Wandb.url in capsys.readouterr().out


def test_trackio_has_the_run_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[str, list[int]] = {}

    def init(project: str, name: str, **named: object) -> SimpleNamespace:
        assert name not in runs, "the earlier export is there still"
        runs[name] = []
        log = lambda metrics, step: runs[name].append(step)  # noqa: E731
        return SimpleNamespace(_next_step=0, log=log, finish=lambda: None)

    def found(project: str) -> list[SimpleNamespace]:
        if not runs:
            raise ValueError(f"Project '{project}' does not exist")
        return [SimpleNamespace(name=name, delete=lambda n=name: runs.pop(n)) for name in [*runs]]

    stand_in = SimpleNamespace(Api=lambda: SimpleNamespace(runs=found), init=init)
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    for _ in range(2):
        assert export(store, monkeypatch, "--to", "trackio") == 0
    assert runs == {"run": [1, 2]}


def test_a_run_that_writes_there_itself_is_left_to_do_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live = RunStore(store, "live")
    live.write_run({"config": {"tracking": {"also": ["wandb"]}}, "code": "0.1.0", "flow": "f:f"})
    small_run.take(live, 1, None, metrics={"reward/mean": 0.25})
    page = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", page)
    assert export(store, monkeypatch, "--to", "wandb", run="live") == 2
    assert "live has not ended, and writes to wandb itself" in capsys.readouterr().err
    assert export(store, monkeypatch, "--to", "wandb", "--project", "p", run="live") == 0
    write_end(live, End(step=1))
    assert export(store, monkeypatch, "--to", "wandb", run="live") == 0


def export_elsewhere(store: Store, home: Path, to: str, **variables: str) -> None:
    """By the real package, in a process whose folders are the test's."""
    words = ["run", "--to", to, "--project", "p", f"store.uri={store.uri}"]
    done = subprocess.run(
        [sys.executable, "-m", "flows.curves", *words],
        cwd=home,
        env={**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "2 steps of run, 2 metrics" in done.stdout


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs the extra wandb")
def test_the_real_weights_and_biases_takes_them_offline(store: Store, tmp_path: Path) -> None:
    export_elsewhere(store, tmp_path, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    (kept,) = tmp_path.glob("wandb/offline-run-*-run/run-run.wandb")
    for text in (b"reward/mean", b"0.25", b"0.5", b"train/loss", b"committed_at"):
        assert text in kept.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="needs the extra trackio")
def test_the_real_trackio_has_each_step_once(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        export_elsewhere(store, tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    with closing(sqlite3.connect(tmp_path / "trackio/p.db")) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
        settings = database.execute("select config from configs").fetchall()
    first, second = ((step, json.loads(metrics)) for step, metrics in rows)
    assert first == (1, {"reward/mean": 0.25, "committed_at": 1e9 + 1})
    assert second == (2, {"reward/mean": 0.5, "train/loss": 0.1, "committed_at": 1e9 + 2})
    assert [json.loads(config)["seed"] for (config,) in settings] == [1]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs the extra tensorboard")
def test_the_real_tensorboard_has_each_step_once(store: Store, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):
        export_elsewhere(store, tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / ".refrain/tensorboard/p/run"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--to", "wandb"), "--to wandb needs the package wandb"),
        (("--to", "trackio", "--file", "x"), "--file goes with --to csv"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert export(store, monkeypatch, *words) == 2
    assert says in capsys.readouterr().err
