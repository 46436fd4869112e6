"""How long a run takes to its first step, a resumed one to its next, and --help to its answer.

    python -m benchmarks.startup [--against CHECKOUT] [--repeats 5] [--only help]

The recipe `tiny`, in a folder of its own. Wall time until the step's commit is in the store, and CPU
seconds (user and system) of the flow process and all processes below it until then; on a machine
with company the second is the one to trust. `--against`: another checkout of Refrain, measured
alternately in the same run with the same Python. Figures are medians; the load says how busy the
machine was. The first round in a folder makes the databases of Prefect and MLflow and draws the
model: it is shown apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parents[1]
LOOK_EVERY = 0.05  # seconds
LIMIT = 1800.0  # seconds for one start


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What it took to get there."""

    wall: float  # seconds
    cpu: float  # seconds, user and system, of all processes


def flow(checkout: Path, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a flow of a checkout."""
    with (folder / "flow.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.grpo", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=log,
            stderr=log,
        )


def cpu_seconds(process: psutil.Process) -> float:
    """Of a process, what is below it, and what was below it and has been waited for."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def commits(folder: Path) -> set[Path]:
    """The committed steps of all runs of a folder."""
    return set(folder.glob(".refrain/store/*/steps/*/commit.json"))


def until_commit(checkout: Path, folder: Path, *words: str) -> tuple[Spent, str]:
    """Start a flow, wait for the next commit and then for its end; also the run's name."""
    before, began = commits(folder), time.monotonic()
    process = flow(checkout, folder, *words)
    try:
        while not (new := commits(folder) - before):
            if process.poll() is not None or time.monotonic() - began > LIMIT:
                raise SystemExit(f"No step was committed; see {folder}/flow.log")
            time.sleep(LOOK_EVERY)
        spent = Spent(wall=time.monotonic() - began, cpu=cpu_seconds(psutil.Process(process.pid)))
        process.wait(LIMIT)
    finally:
        process.terminate()
        process.wait()
    return spent, new.pop().parents[2].name


def until_help(checkout: Path, folder: Path) -> Spent:
    """The answer to --help."""
    before, began = os.times(), time.monotonic()
    if flow(checkout, folder, "--help").wait(LIMIT) != 0:
        raise SystemExit(f"--help failed; see {folder}/flow.log")
    after, wall = os.times(), time.monotonic() - began
    cpu = after.children_user + after.children_system
    return Spent(wall=wall, cpu=cpu - before.children_user - before.children_system)


def measure(checkout: Path, folder: Path, only: str) -> dict[str, Spent]:
    """Each figure once."""
    found = {"--help": until_help(checkout, folder)}
    if only != "help":
        found["first step"], name = until_commit(checkout, folder, "tiny", "steps=1")
        found["resumed step"], _ = until_commit(checkout, folder, "--resume", name, "steps=2")
    return found


def report(rounds: Sequence[dict[str, Spent]], title: str) -> None:
    """Medians over rounds."""
    for name in rounds[0]:
        wall = statistics.median(one[name].wall for one in rounds)
        cpu = statistics.median(one[name].cpu for one in rounds)
        print(f"{title:<28} {name:<14} {wall:8.2f} s wall {cpu:8.2f} s CPU", flush=True)


def main() -> None:
    """Measure and print."""
    words = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    words.add_argument("--against", type=Path, help="another checkout, measured alternately")
    words.add_argument("--repeats", type=int, default=5)
    words.add_argument("--only", choices=["help", "all"], default="all")
    options = words.parse_args()
    sides = {"here": HERE}
    if options.against is not None:
        sides["against"] = options.against.absolute()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    with tempfile.TemporaryDirectory(prefix="startup-") as made:
        rounds: dict[str, list[dict[str, Spent]]] = {name: [] for name in sides}
        for number in range(options.repeats + 1):
            for name, checkout in sides.items():
                folder = Path(made, name)
                folder.mkdir(exist_ok=True)
                found = measure(checkout, folder, options.only)
                rounds[name].append(found)
                if number == 0:
                    report([found], f"{name}, fresh folder")
        for name, found_all in rounds.items():
            report(found_all[1:], f"{name}, median of {options.repeats}")
    print(f"load {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
