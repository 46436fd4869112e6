"""What a watcher says of a run that works, ends or dies elsewhere, by its store alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from configs.storage import StoreConfig
from storage.objects.errors import StoreUnavailable
from storage.objects.store import Store
from storage.runs.live import End, Phase, Progress, RolledBack, write_end, write_progress
from storage.runs.run_lease import RunLease
from storage.runs.run_store import RunStore
from tasks.commands import watch as module
from tasks.commands.command import Request
from tasks.commands.watch import Watch
from tasks.reporting.terminal import Terminal
from tests.storage.audit import small_run

SAMPLING = Phase(name="sampling", done=12, total=64, unit="shards", seconds=4.0)


def recorded(folder: Path, name: str) -> RunStore:
    """A run with four steps that are committed."""
    run = RunStore(Store(str(folder / "store")), name)
    small_run.make(run)
    return run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    settings = load_recipe(GRPOConfig, "tiny", ["steps=9"])
    monkeypatch.setattr(module, "settings_of", lambda files: settings)
    monkeypatch.setattr(module, "flow_of", lambda files: "flows.grpo:grpo")
    return recorded(tmp_path, "r")


class Watched:
    """A watch whose time passes by what happens between its looks."""

    def __init__(self, run: RunStore, *between: Callable[[], object], steps: int = 2) -> None:
        self.out, self.now = StringIO(), 0.0
        self.between = list(between)
        arguments = argparse.Namespace(steps=steps, json=False)
        request = Request(files=run, store=StoreConfig(), cluster=[], arguments=arguments)
        terminal = Terminal(Console(file=self.out, width=400))
        self.watch = Watch(request, terminal, clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += 20.0
        assert self.between, f"it goes on for ever: {self.out.getvalue()}"
        self.between.pop(0)()

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


def test_a_run_that_works_is_shown_until_it_is_finished(run: RunStore) -> None:
    lease = RunLease.acquire(run, "flow")
    busy = Progress(epoch=lease.epoch, step=5, steps=9, phases=(SAMPLING,), seconds_left=90.0)
    write_progress(run, busy)

    def finish() -> None:
        write_end(run, End(step=4))
        lease.release()

    watched = Watched(run, lambda: None, finish)
    assert watched.watch.until_the_end() == {"run": "r", "state": "finished", "step": 4}
    lines = watched.lines
    assert lines[0] == "Run r: 9 steps"
    assert lines[1].startswith("step 3/9  reward ")
    assert lines[2].startswith("step 4/9  reward ")
    assert lines[3] == "step 5/9 · 1 min 30 s left · sampling 12/64 shards, 4 s"
    assert lines[4] == "step 5/9 · 1 min 10 s left · sampling 12/64 shards, 24 s"
    assert lines[5] == "r is finished: 4 steps are committed."
    assert len(lines) == 6


def test_steps_that_are_committed_meanwhile_have_their_lines(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "head", lambda files: 2)
    late = run.store.read(run.commit_key(4))
    run.store.delete([run.commit_key(4)])
    lease = RunLease.acquire(run, "flow")

    def commit() -> None:
        assert watched.watch._step == 3
        run.store.write(run.commit_key(4), late)

    watched = Watched(run, commit, lease.release, steps=0)
    assert watched.watch.until_the_end()["step"] == 4
    steps = [line.partition("  ")[0] for line in watched.lines if line.startswith("step ")]
    assert [step for step in steps if "·" not in step] == ["step 3/9", "step 4/9"]


def test_a_flow_that_died_is_told_from_one_that_was_stopped(run: RunStore) -> None:
    RunLease.acquire(run, "flow").release()
    stopped = Watched(run, steps=0)
    assert stopped.watch.until_the_end()["state"] == "stopped"
    assert stopped.lines[1] == "r stopped after step 4."
    assert stopped.lines[-1] == "To go on: refrain grpo --resume r"
    dead = RunLease.acquire(run, "flow", clock=lambda: 1e9)  # in the year 2001
    write_progress(run, Progress(epoch=dead.epoch, step=5, steps=9, phases=(SAMPLING,)))
    died = Watched(run, steps=0)
    assert died.watch.until_the_end()["state"] == "died"
    assert "died: its last sign of life is" in died.lines[1]
    assert died.lines[2] == "What it said: refrain logs r"
    assert not any("sampling" in line for line in died.lines)


def test_what_an_earlier_flow_left_is_not_taken_for_the_words_of_this_one(run: RunStore) -> None:
    lease = RunLease.acquire(run, "flow")
    write_progress(run, Progress(epoch=lease.epoch - 1, step=5, steps=9, phases=(SAMPLING,)))
    watched = Watched(run, lease.release, steps=0)
    watched.watch.until_the_end()
    assert watched.lines[1] == "step 4/9 · waiting for a word of the flow · 0 s"


def test_a_flow_that_says_nothing_is_told(run: RunStore) -> None:
    lease = RunLease.acquire(run, "flow")
    write_progress(run, Progress(epoch=lease.epoch, step=5, steps=9, phases=(SAMPLING,)))
    watched = Watched(run, *[lambda: None] * 2, lease.release, steps=0)
    watched.watch.until_the_end()
    assert watched.lines[2] == "step 5/9 · sampling 12/64 shards, 24 s"
    assert watched.lines[3] == "step 5/9 · nothing is heard of it · 40 s"


def test_the_run_that_goes_on_with_one_is_watched_in_its_place(
    run: RunStore, tmp_path: Path
) -> None:
    child = recorded(tmp_path, "child")
    child.store.write(child.run_json_key, run.store.read(run.run_json_key))
    write_end(child, End(step=4))
    back = RolledBack(to=2, child="child", guard="kl", why="The KL was too large.")
    write_end(run, End(step=4, rolled_back=back))
    watched = Watched(run, lambda: None, steps=0)
    assert watched.watch.until_the_end() == {"run": "child", "state": "finished", "step": 4}
    assert watched.lines[1] == "r: rolled back to step 2 by kl, continued as child."


def test_a_store_that_is_away_is_asked_again(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = [StoreUnavailable("The store does not answer.")]

    def read(files: RunStore) -> End | None:
        if away:
            raise away.pop()
        return End(step=4)

    monkeypatch.setattr(module, "read_end", read)
    write_end(run, End(step=4))
    watched = Watched(run, lambda: None, steps=0)
    assert watched.watch.until_the_end()["state"] == "finished"
    assert watched.lines[1] == "The store does not answer. It is asked again."
