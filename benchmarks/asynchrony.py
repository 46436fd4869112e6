"""What overlapping steps gain, on the real flow with rollout engines that sleep.

    python -m benchmarks.asynchrony [--draws bimodal …] [--units 64 …] [--staleness 0 2 …]
                                    [--carry 1.25]

16 rollout workers with one slot each; a step has so many units (groups), which take drawn times. With
a hard bound and nothing dropped no schedule is faster than

    u[k+1] = max(u[k], u[k-n] + longest_k) + train,    nor than all work / 16 engines,

where u[k] is when step k is committed, longest_k its longest unit, and train what a step takes
from its last reward to its commit, the run's median. Printed: seconds a step, the larger of the two
bounds, what share of it was reached, and the gain over n = 0 of the same draw and units. With --carry
so many times the groups are under way, and a step does not wait for all: that bound is then not one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from benchmarks.sleeping_engine import VARIABLE, seconds
from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore

WORKERS = 16
DRAWS = ("equal", "uniform", "lognormal1.0", "lognormal1.5", "bimodal")


def words(units: int, staleness: int, steps: int, carry: float) -> list[str]:
    """A tiny model, so that what is measured is waiting."""
    carried = ["rollout.partial_rollout=carry"] if carry > 1 and staleness else []
    return [
        *carried,
        f"rollout.over_sampling={carry if carried else 1}",
        "tiny",
        f"steps={steps}",
        f"prompts_per_step={units}",
        f"rollout.shards={units}",
        f"max_staleness={staleness}",
        "algorithm.correction=[{kind: truncate}]",
        "group_size=2",
        "data.source.size=4096",
        "rollout.max_new_tokens=16",
        f"cluster.pools.rollout={{workers: {WORKERS}, threads: 1, slots: 1}}",
        "store.snapshot_every=100",
    ]


def run_one(units: int, staleness: int, steps: int, carry: float) -> int:
    """The flow, in this process, with engines that sleep."""
    import tasks.run.engines as made
    from configs.grpo import GRPOConfig
    from tasks.launch.command_line import main

    made.engine_class = lambda config: "benchmarks.sleeping_engine:SleepingEngine"
    return main("flows.grpo:grpo", GRPOConfig, words(units, staleness, steps, carry))


def measured(folder: Path, draw: str, units: int, staleness: int) -> dict[str, float]:
    """Seconds a step of the run in a folder, and the bounds."""
    store = Store(f"file://{folder}/.refrain/store")
    (name,) = store.children()
    files = RunStore(store, name)
    commits = [read_commit(files, step) for step in range(1, (head(files) or 0) + 1)]
    ends = [commit.committed_at for commit in commits]
    first = min(float(str(one["started"])) for one in commits[0].attempts)
    trains = []
    for before, commit in zip([first, *ends], commits, strict=False):
        scored = [end(one) for one in commit.attempts if one["stage"] == "reward"]
        trains.append(commit.committed_at - max(before, *scored))
    train = statistics.median(trains)
    lengths = [
        [seconds(draw, group) for group in range(step * units, (step + 1) * units)]
        for step in range(len(commits))
    ]
    done = [0.0]  # u[0], u[1], …
    for step, units_of in enumerate(lengths):
        done.append(max(done[-1], done[max(0, step - staleness)] + max(units_of)) + train)
    work = sum(map(sum, lengths)) / WORKERS + train
    steps = len(commits)
    return {
        "step": (ends[-1] - first) / steps,
        "bound": max(done[-1], work) / steps,
        "train": train,
    }


def end(attempt: Mapping[str, JsonValue]) -> float:
    """When an attempt of a commit's record ended."""
    return float(str(attempt["started"])) + float(str(attempt["seconds"]))


def flow_run(draw: str, units: int, staleness: int, steps: int, carry: float) -> dict[str, float]:
    """One run in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="asynchrony-") as folder:
        command = [sys.executable, "-m", "benchmarks.asynchrony", "--one"]
        command += ["--units", str(units), "--staleness", str(staleness), "--steps", str(steps)]
        command += ["--carry", str(carry)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), VARIABLE: draw}
        log = Path(folder, "log")
        with log.open("w") as out:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=out)
        if done.returncode != 0:
            raise SystemExit(log.read_text())
        return measured(Path(folder), draw, units, staleness)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asynchrony", description=__doc__)
    parser.add_argument("--draws", nargs="+", choices=DRAWS, default=DRAWS)
    parser.add_argument("--units", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--seconds", type=float, default=2.0, help="mean of a unit")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--carry", type=float, default=1.0, help="rollout.over_sampling, n > 0")
    parser.add_argument("--json", type=Path, help="file to which every figure is written")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        return run_one(options.units[0], options.staleness[0], options.steps, options.carry)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
    rows = []
    for name in options.draws:
        for units in options.units:
            synchronous = 0.0
            for staleness in options.staleness:
                draw = f"{name}:{options.seconds}"
                found = flow_run(draw, units, staleness, options.steps, options.carry)
                synchronous = synchronous or found["step"]
                rows.append({"draw": name, "units": units, "staleness": staleness, **found})
                print(
                    f"{name:<13} {units:3} units  n = {staleness}  {found['step']:6.2f} s a step  "
                    f"bound {found['bound']:6.2f} s ({found['bound'] / found['step']:4.0%})  "
                    f"train {found['train']:4.2f} s  {synchronous / found['step']:4.2f} x of n = "
                    f"{options.staleness[0]}",
                    flush=True,
                )
    with contextlib.suppress(AttributeError):
        options.json.write_text(json.dumps(rows, indent=1))
    print(f"load {os.getloadavg()[0]:.1f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
