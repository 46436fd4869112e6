"""A tiny run and a watch of one, on real terminals of 80 columns and 24 rows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from storage.audit.audit import audit
from storage.objects.store import Store
from storage.runs.commit_log import head
from storage.runs.live import read_progress
from storage.runs.run_store import RUN_NAME, RunStore
from tests.flows.conftest import ROOT, Launch, settings_for
from tests.terminal import ProgramOnScreen, on_screen

pytestmark = pytest.mark.cluster

# The bottom of the screen while a step samples or scores.
COUNTED = re.compile(r"^  (sampling|scoring) +[━╸╺]* +\d+ s +\d/4 shards")
STEP = re.compile(r"^step +(\d+)/\d+  reward ")
COLOUR = re.compile(rb"\x1b\[(3[0-9]|38;[0-9;]+)m")


def words(module: str, *others: str) -> list[str]:
    return [sys.executable, "-m", "tests.flows.without_torch", module, *others]


def variables(prefect_api: str, **more: str) -> dict[str, str]:
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours, **settings_for(prefect_api), **more}


def run_in(folder: Path) -> RunStore:
    """The only run of the folder, as soon as it has committed a step."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        store = Store(f"file://{folder}/.refrain/store")
        names = [name for name in store.children() if RUN_NAME.fullmatch(name)]
        if names and store.exists(f"{names[0]}/HEAD"):
            return RunStore(store, names[0])
        time.sleep(0.1)
    raise AssertionError("no step was committed")


def watch(folder: Path, run: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Without a terminal."""
    return subprocess.run(
        words("flows.watch", run, *options),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def check_steps(lines: Sequence[str], numbers: Sequence[int]) -> None:
    """Each step has one line, none of which a terminal has broken."""
    found = [match[1] for line in lines if (match := STEP.match(line))]
    assert found == [str(number) for number in numbers], "\n".join(lines)
    assert all(" s" in line for line in lines if STEP.match(line))


def check_left_clean(program: ProgramOnScreen) -> None:
    """The cursor is seen, the terminal is as it was, and no live line is left."""
    assert not program.screen.cursor.hidden
    assert program.raw.rfind(b"\x1b[?25h") > program.raw.rfind(b"\x1b[?25l")
    assert not any(
        re.match(r"^  (sampling|scoring|update|log-probs)", one) for one in program.lines
    )


@pytest.mark.slow
def test_a_run_shows_its_phases_and_leaves_a_line_for_each_step(
    prefect_api: str, tmp_path: Path
) -> None:
    command = words("flows.grpo", "tiny", "steps=30", "rollout.shards=4")
    with on_screen(command, tmp_path, variables(prefect_api)) as program:
        started = program.until(lambda lines: any("Starting" in line for line in lines))
        assert all(len(line) <= 80 for line in started)
        busy = program.until(
            lambda lines: any(map(COUNTED.match, lines)) and any(map(STEP.match, lines))
        )
        place = next(at for at, line in enumerate(busy) if COUNTED.match(line))
        assert re.match(r"^step \d+/30 · .* left$", busy[place - 1]), "\n".join(busy)
        assert all(STEP.match(line) is None for line in busy[place:]), "lines are above the phases"
        assert COLOUR.search(program.raw)
        committed = head(run_in(tmp_path)) or 0
        program.press_ctrl_c()
        assert program.end() == 130
    check_left_clean(program)
    lines = program.everything
    again = next(at for at, line in enumerate(lines) if line.startswith("Stopped. To go on: "))
    assert lines[again].startswith("Stopped. To go on: refrain grpo --resume ")
    steps = [int(match[1]) for line in lines if (match := STEP.match(line))]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= committed

    files = run_in(tmp_path)
    stopped = watch(tmp_path, files.run, "--json")
    assert stopped.returncode == 1
    ended = json.loads(stopped.stdout)
    assert (ended["run"], ended["step"]) == (files.run, head(files))
    if ended["state"] == "stopped":
        assert read_progress(files) is None, "a flow that leaves takes its words with it"
    assert ended["state"] in ("stopped", "died"), (
        "a slow machine ends it before its lease is given up"
    )


@pytest.mark.slow
def test_a_run_elsewhere_is_watched_until_it_ends(
    launch: Launch, prefect_api: str, tmp_path: Path
) -> None:
    run = launch("tiny", "steps=8", "rollout.shards=4")
    files = run_in(tmp_path)
    command = words("flows.watch", files.run, "--steps", "0")
    with on_screen(command, tmp_path, variables(prefect_api, NO_COLOR="1")) as program:
        program.until(lambda lines: any(line.startswith("step ") for line in lines))
        assert read_progress(files) is not None
        code, out = run.end()
        assert code == 0, out
        assert program.end() == 0, "\n".join(program.everything)
    check_left_clean(program)
    assert not COLOUR.search(program.raw)
    lines = program.everything
    assert lines[0].startswith(f"Run {files.run}: 8 steps on ")
    first = next(int(match[1]) for line in lines if (match := STEP.match(line)))
    check_steps(lines, range(first, 9))
    assert lines[-1] == f"{files.run} is finished: 8 steps are committed."

    assert "\x1b" not in out, "no terminal, so no control characters"
    check_steps(out.splitlines(), range(1, 9))
    assert audit(files).problems == []
    assert read_progress(files) is None
    plain = watch(tmp_path, files.run, "--steps", "2")
    assert plain.returncode == 0
    assert [line for line in plain.stdout.splitlines() if STEP.match(line)] == [
        line for line in out.splitlines() if line.startswith(("step 7/8", "step 8/8"))
    ]
