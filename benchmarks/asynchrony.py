"""What overlapping steps gain, on the real flow with rollout engines that sleep.

    python -m benchmarks.asynchrony [--draws bimodal …] [--units 64 …] [--staleness 0 2 …]
                                    [--carry 1.25]

16 rollout workers (--workers) with one slot each; a step has so many units (groups), which take drawn
times. With a hard bound and nothing dropped no schedule is faster than

    u[k+1] = max(u[k], u[k-n] + longest_k) + train,    nor than all work / workers,

where u[k] is when step k is committed, longest_k its longest unit, and train what a step takes from
its last reward to its commit, the run's median. Who does not know how long a unit takes starts them
in order, and may start a long one last: `in order` is that schedule with free hand-overs, computed
from the same durations, and what a run can be compared with. Printed: seconds a step, the larger of
the two bounds and the schedule in order, what share of each was reached, and the gain over n = 0 of
the same draw and units. With --carry so many times the groups are under way, and a step does not
wait for all: those limits are then none.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import JsonValue

from benchmarks.sleeping_engine import VARIABLE, run, seconds
from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore

DRAWS = ("equal", "uniform", "lognormal1.0", "lognormal1.5", "bimodal")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is run."""

    units: int  # groups a step
    staleness: int  # max_staleness
    steps: int
    carry: float  # rollout.over_sampling where staleness is above 0; 1 waits for every group
    workers: int  # rollout engines


def words(setting: Setting) -> list[str]:
    """A tiny model, so that what is measured is waiting."""
    carried = setting.carry > 1 and setting.staleness > 0
    return [
        "tiny",
        f"steps={setting.steps}",
        f"prompts_per_step={setting.units}",
        f"rollout.shards={setting.units}",
        f"rollout.over_sampling={setting.carry if carried else 1}",
        f"rollout.partial_rollout={'carry' if carried else 'off'}",
        f"max_staleness={setting.staleness}",
        "algorithm.correction=[{kind: truncate}]",
        "group_size=2",
        "data.source.size=4096",
        "rollout.max_new_tokens=16",
        f"cluster.pools.rollout={{workers: {setting.workers}, threads: 1, slots: 1}}",
        "store.snapshot_every=100",
    ]


def run_one(setting: Setting) -> int:
    """The flow, in this process, with engines that sleep."""
    return run(words(setting))


def measured(folder: Path, draw: str, setting: Setting) -> dict[str, float]:
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
        [seconds(draw, step * setting.units + unit) for unit in range(setting.units)]
        for step in range(len(commits))
    ]
    done = [0.0]  # u[0], u[1], …
    for step, units_of in enumerate(lengths):
        done.append(max(done[-1], done[max(0, step - setting.staleness)] + max(units_of)) + train)
    work = sum(map(sum, lengths)) / setting.workers + train
    steps = len(commits)
    return {
        "step": (ends[-1] - first) / steps,
        "bound": max(done[-1], work) / steps,
        "in_order": in_order(lengths, setting.staleness, setting.workers, train) / steps,
        "train": train,
    }


def in_order(lengths: Sequence[Sequence[float]], ahead: int, workers: int, train: float) -> float:
    """Seconds of steps whose units start in order, each on the worker that is free first.

    A step begins to sample once the one `ahead` + 1 before it is committed. Two workers, one step of
    units of 1, 1 and 3 s: 4 s, where the shortest would be 3.
    """
    free = [0.0] * workers
    done = [0.0]
    for step, units in enumerate(lengths):
        begin, end = done[max(0, step - ahead)], 0.0
        for unit in units:
            at = max(heapq.heappop(free), begin) + unit
            heapq.heappush(free, at)
            end = max(end, at)
        done.append(max(end, done[-1]) + train)
    return done[-1]


def end(attempt: Mapping[str, JsonValue]) -> float:
    """When an attempt of a commit's record ended."""
    return float(str(attempt["started"])) + float(str(attempt["seconds"]))


def flow_run(draw: str, setting: Setting) -> dict[str, float]:
    """One run in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="asynchrony-") as folder:
        command = [sys.executable, "-m", "benchmarks.asynchrony", "--one"]
        command += ["--units", str(setting.units), "--staleness", str(setting.staleness)]
        command += ["--steps", str(setting.steps), "--carry", str(setting.carry)]
        command += ["--workers", str(setting.workers)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), VARIABLE: draw}
        log = Path(folder, "log")
        with log.open("w") as out:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=out)
        if done.returncode != 0:
            raise SystemExit(log.read_text())
        return measured(Path(folder), draw, setting)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asynchrony", description=__doc__)
    parser.add_argument("--draws", nargs="+", choices=DRAWS, default=DRAWS)
    parser.add_argument("--units", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--seconds", type=float, default=2.0, help="mean of a unit")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--carry", type=float, default=1.0, help="rollout.over_sampling, n > 0")
    parser.add_argument("--workers", type=int, default=16, help="rollout workers, of one slot each")
    parser.add_argument("--json", type=Path, help="file to which every figure is written")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    settings = [
        Setting(
            units=units,
            staleness=staleness,
            steps=options.steps,
            carry=options.carry,
            workers=options.workers,
        )
        for units in options.units
        for staleness in options.staleness
    ]
    if options.one:
        return run_one(settings[0])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
    rows = []
    for name in options.draws:
        first: dict[int, float] = {}  # units -> seconds a step with the first staleness
        for setting in settings:
            found = flow_run(f"{name}:{options.seconds}", setting)
            synchronous = first.setdefault(setting.units, found["step"])
            rows.append({"draw": name, **asdict(setting), **found})
            print(
                f"{name:<13} {setting.units:3} units  n = {setting.staleness}  "
                f"{found['step']:6.2f} s a step  bound {found['bound']:6.2f} s "
                f"({found['bound'] / found['step']:4.0%})  in order {found['in_order']:6.2f} s "
                f"({found['in_order'] / found['step']:4.0%})  train {found['train']:4.2f} s  "
                f"{synchronous / found['step']:4.2f} x of n = {options.staleness[0]}",
                flush=True,
            )
    with contextlib.suppress(AttributeError):
        options.json.write_text(json.dumps(rows, indent=1))
    print(f"load {os.getloadavg()[0]:.1f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
