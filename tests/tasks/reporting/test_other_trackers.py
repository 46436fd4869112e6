"""Trackers besides MLflow that are slow, hang, die, refuse or cannot be imported; no step waits.

The tracker is a package of the test's in place of Trackio, in the process that Trackio would be in.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.commit_log import Commit
from storage.runs.live import End, write_end
from storage.runs.run_store import RunStore
from storage.tracking.tracker import TrackedData, TrackedRun
from tasks.reporting import mlflow_page, other_trackers, tracker_process
from tasks.reporting.other_trackers import OtherTracker
from tasks.run import preflight
from tasks.run.events import (
    BackFillBegan,
    BackFillEnded,
    EnginesReady,
    Listeners,
    RunClosed,
    RunFinished,
    StepCommitted,
    VersionEvaluated,
)
from tests.storage.audit import small_run

PACKAGE = """
import os, time, warnings
from pathlib import Path
{at_import}
HERE = Path(__file__).parent

def tell(*words):
    with (HERE / "told").open("a") as file:
        print(*words, file=file)

class Run:
    def __init__(self, resume, config):
        known = HERE / "next"
        self._next_step = int(known.read_text()) if known.exists() else 0
        parent = config["refrain"].get("forked_from", "")
        tell("begin", self._next_step, resume, config["seed"], parent)

    def log(self, metrics, step):
        name, value = next(iter(metrics.items()))
        {at_log}
        tell(step, name, value)
        if name == "reward/mean":
            (HERE / "next").write_text(str(step + 1))

    def finish(self):
        {at_finish}
        tell("end")

def init(resume, config, **named):
    {at_init}
    print("a tracker's own words")
    return Run(resume, config)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the package, with statements that break it; the file that says what it was told."""
    monkeypatch.setattr(mlflow_page, "PAUSES", (0.05, 0.05))
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(**broken: str) -> Path:
        places = ("at_import", "at_init", "at_log", "at_finish")
        text = PACKAGE.format(**{place: broken.get(place, "pass") for place in places})
        (folder / "trackio.py").write_text(text)
        return folder / "told"

    return make


class Flow:
    """A run that makes steps, which are in its store, and tells of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, parent: str | None = None):
        self.files = RunStore(Store(f"file://{folder}/store"), "r")
        self.files.write_run({"config": {"seed": 5}, "code": "0.1.0", "flow": "f:f"})
        self.config = load_recipe(GRPOConfig, "tiny")
        self.said: list[str] = []
        self.last: Commit | None = None
        data = TrackedData(name="sums", digest="sha256:1", source={}, rows=3)
        tracked = TrackedRun(
            run="r", store_uri="", settings={}, data=data, model_name="tiny", forked_from=parent
        )
        monkeypatch.setattr(other_trackers, "tracked_run", lambda facts: tracked)
        self.begin()

    def begin(self) -> None:
        """A flow has the run, the first or another one."""
        self.listeners = Listeners()
        self.tracker = OtherTracker("trackio", self.config, self.files, self.said.append)
        facts: Any = SimpleNamespace(name="r", start=0)
        self.tracker.listen(facts, self.listeners)
        self.listeners.tell(EnginesReady(last=self.last, snapshot=False))

    def step(self, metrics: dict[str, float] | None = None, tells: bool = True) -> float:
        """One more step; seconds for which telling it held the run."""
        number = 1 if self.last is None else self.last.step + 1
        shown = metrics or {"reward/mean": number / 4}
        self.last = small_run.take(self.files, number, self.last, metrics=shown)
        began = time.monotonic()
        if tells:
            for hear in self.listeners._at_once[StepCommitted]:
                hear(SimpleNamespace(record=self.last))
        return time.monotonic() - began

    def end(self, error: BaseException | None = None) -> float:
        """The run ends; seconds for which it waited."""
        began = time.monotonic()
        self.listeners.tell(RunClosed(error=error))
        return time.monotonic() - began


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Flow]]:
    made: list[Flow] = []

    def make(**named: Any) -> Flow:
        made.append(Flow(tmp_path, monkeypatch, **named))
        return made[-1]

    yield make
    for one in made:
        one.tracker._tracker.close()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def evaluated(version: int, at: float = 1.0) -> VersionEvaluated:
    weights = SimpleNamespace(digest="d")
    result: Any = SimpleNamespace(
        version=version, weights=weights, suite="math", on="d", metrics={"accuracy": 0.5}, cost={},
        made_at=at, known_as=lambda suite, number: result,
    )  # fmt: skip
    return VersionEvaluated(result=result, version=version)


def test_a_run_its_evaluations_and_its_cost_are_told_and_a_resumed_one_goes_on(
    package: Callable[..., Path], flow: Callable[..., Flow]
) -> None:
    told, run = package(), flow(parent="q")
    run.step()
    run.listeners.tell(evaluated(1))
    run.step()
    run.end(RuntimeError("a worker died"))
    run.step(tells=False)  # committed by a flow that died before it could tell
    run.begin()
    run.step()
    run.listeners.tell(
        RunFinished(step=4, cost={"cost/so_far/device_hours": 2.0, "cost/other": 1.0})
    )
    run.end()
    assert told.read_text().splitlines() == [
        "begin 0 allow 0 q",
        "1 reward/mean 0.25",
        "1 eval/math/accuracy 0.5",
        "2 reward/mean 0.5",
        "end",
        "begin 3 allow 0 q",
        "3 reward/mean 0.75",
        "4 reward/mean 1.0",
        "4 cost/run/device_hours 2.0",
        "end",
    ]
    assert run.said == ["Curves also in Trackio: trackio show --project refrain"] * 2
    assert "trackio" not in sys.modules


def test_one_that_hangs_is_killed_told_once_and_has_all_in_the_end(
    package: Callable[..., Path], flow: Callable[..., Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_process, "LOG_SECONDS", 1.0)
    hangs = 'if step == 2 and not (HERE / "mended").exists(): time.sleep(1000)'
    told, run = package(at_log=hangs), flow()
    assert max(run.step() for _ in range(4)) < 0.2, "no step waits"
    until(lambda: len(run.said) == 2)
    assert run.said[1] == (
        "Trackio was not written to: log took longer than 1 s. The run goes on; what Trackio misses "
        "follows when it answers."
    )
    (told.parent / "mended").touch()
    run.end()
    logged = [line.split()[0] for line in told.read_text().splitlines() if "reward" in line]
    assert logged == ["1", "2", "3", "4"]
    assert "Trackio answers again" in run.said[-1]


@pytest.mark.parametrize("where", ["at_log", "at_finish", "at_init"])
def test_a_run_ends_soon_though_a_tracker_never_answers(
    package: Callable[..., Path],
    flow: Callable[..., Flow],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    for name in ("START_SECONDS", "LOG_SECONDS", "FINISH_SECONDS", "SLOW"):
        place = other_trackers if name == "SLOW" else tracker_process
        monkeypatch.setattr(place, name, 1.0)
    package(**{where: "time.sleep(1000)"})
    run = flow()
    run.step()
    assert run.end() < 20
    assert "Trackio has not heard of all" in run.said[-1]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"at_import": "raise OSError('no libfoo')"}, "cannot be used: OSError: no libfoo."),
        ({"at_import": "os._exit(3)"}, "exited with 3"),
    ],
)
def test_one_that_cannot_be_imported_is_told_and_left(
    package: Callable[..., Path], flow: Callable[..., Flow], broken: dict[str, str], says: str
) -> None:
    package(**broken)
    run = flow()
    run.step()
    until(lambda: run.said)
    assert run.step() < 0.2
    run.end()
    (only,) = run.said
    assert says in only and only.endswith("The run goes on without Trackio.")


def test_what_is_refused_is_told_once_and_the_rest_is_written(
    package: Callable[..., Path], flow: Callable[..., Flow]
) -> None:
    refuses = 'if name != "reward/mean": raise ValueError(f"step {step}: no such name")'
    told, run = package(at_log=refuses), flow()
    for step in range(1, 6):
        run.step({"odd": 1.0} if step % 2 else None)
    run.end()
    logged = [line.split()[0] for line in told.read_text().splitlines() if "reward" in line]
    assert logged == ["2", "4"]
    assert run.said[1:] == [
        "Trackio failed at log: ValueError: step 1: no such name. What it does not take is left out; "
        "the run goes on."
    ]


def test_what_it_warns_of_is_told_once(
    package: Callable[..., Path], flow: Callable[..., Flow]
) -> None:
    package(at_log='warnings.warn(f"step {step} is not on the disk.")')
    run = flow()
    for _ in range(3):
        run.step()
    run.end()
    assert run.said[1:] == ["Trackio: step 1 is not on the disk."]


def test_results_of_a_back_fill_go_to_a_run_that_is_done(
    package: Callable[..., Path], flow: Callable[..., Flow]
) -> None:
    told, run = package(), flow()
    run.step()
    run.end()
    for done in (False, True):
        if done:
            write_end(run.files, End(step=1))
        listeners = Listeners()
        tracker = OtherTracker("trackio", run.config, run.files, run.said.append)
        tracker.listen_to_back_fill(listeners)
        listeners.tell(BackFillBegan())
        for event in (evaluated(1), evaluated(0, at=time.time()), BackFillEnded()):
            listeners.tell(event)  # the first has been in the store, and was told when it was made
        if not done:
            assert "one process at a time writes to Trackio" in run.said[-1]
            assert "eval" not in told.read_text()
    assert told.read_text().splitlines()[-3:] == [
        "begin 2 allow 5 ",
        "0 eval/math/accuracy 0.5",
        "end",
    ]


def test_a_tracker_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_recipe(GRPOConfig, "tiny", ["tracking.also=[wandb]"])
    known = preflight.installed
    monkeypatch.setattr(
        preflight, "installed", lambda name: None if name == "wandb" else known(name)
    )
    with pytest.raises(ConfigError, match=r"tracking\.also has wandb, .* Install it: pip install"):
        preflight.check_packages(config)
