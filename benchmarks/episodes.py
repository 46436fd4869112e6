"""Turns a second of an environment that answers at once, against those of the engine's calls alone.

    python -m benchmarks.episodes [--at-once 1 4 16 64 256] [--shards 1] [--turns 8] [--steps 6]
        [--drives together apart] [--slow 2.0] [--processes 16]

The real flow: a random two-layer model on the transformers engine, an environment that says two
characters and never ends, so that an episode is over after so many turns. All episodes of a step are
played at once. A turn ends at one of ten characters, after about ten tokens. With --slow one turn in
eight is answered after so many seconds; which ones, is the same for both drives.

Printed, medians over the steps but the first: turns of a step; turns a second from the first call of
the engine to the last answer of the environment; the same counting only the time in which a call to
the engine was under way (what an environment without cost would give); milliseconds of each round of
turns in which only the environment was called, and in which neither was (the flow's).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from storage.objects.store import Store
from storage.runs.commit_log import Commit, history
from storage.runs.run_store import RunStore

LIMIT = 900.0  # seconds of a run
GROUP = 4


class Answering:
    """Says something at once, or after `slow` seconds, and gives its reward when it is asked."""

    def __init__(self, slow: float = 0.0) -> None:
        self.slow, self.seed, self.turn = slow, 0, 0

    def reset(self, seed: int = 0, **row: object) -> str:
        """Begin."""
        self.seed, self.turn = seed, 0
        return ""

    def step(self, text: str) -> str:
        """Answer a turn."""
        self.turn += 1
        if zlib.crc32(f"{self.seed}/{self.turn}/{text}".encode()) % 8 == 0:
            time.sleep(self.slow)
        return "+:"

    def get_reward(self) -> float:
        """The same for all."""
        return 1.0


def rows(size: int) -> list[dict[str, str]]:
    """Prompts, all alike."""
    return [{"question": "number "} for _ in range(size)]


def words(at_once: int, drive: str, options: argparse.Namespace) -> list[str]:
    """The settings of a run with so many episodes at once."""
    shards, turns, steps = options.shards, options.turns, options.steps
    group = min(GROUP, at_once)
    return [
        "tiny",
        f"steps={steps}",
        f"prompts_per_step={at_once // group}",
        f"group_size={group}",
        "data.source={kind: function, path: 'benchmarks.episodes:rows', params: {size: 1024}}",
        "episodes.environment={kind: class, path: 'benchmarks.episodes:Answering'}",
        f"episodes.environment.params.slow={options.slow}",
        f"episodes.drive={drive}",
        f"episodes.processes={options.processes}",
        f"episodes.max_turns={turns}",
        "rewards.functions=[{kind: environment}]",
        f"rollout.max_new_tokens={turns * 96}",
        f"model.max_positions={turns * 96 + 64}",
        "data.max_prompt_tokens=32",
        "rollout.stop=['0','1','2','3','4','5','6','7','8','9']",
        f"rollout.shards={min(shards, at_once // group)}",
        "algorithm.advantage={kind: reinforce}",
        "algorithm.selection=[]",
        "store.snapshot_every=100000",
    ]


def measured(setting: Sequence[str]) -> list[Commit]:
    """The commits of a run, oldest first."""
    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory(prefix="episodes-") as name:
        done = subprocess.run(
            [sys.executable, "-m", "flows.grpo", *setting, f"store.uri=file://{name}/store"],
            cwd=name,
            env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        if done.returncode:
            raise SystemExit(done.stdout)
        store = Store(f"file://{name}/store")
        return list(history(RunStore(store, store.children()[0])))[::-1]


def spans(commit: Commit, *stages: str) -> list[tuple[float, float]]:
    """When calls of some stages began and ended."""
    return [
        (float(str(one["started"])), float(str(one["started"])) + float(str(one["seconds"])))
        for one in commit.attempts
        if one["stage"] in stages
    ]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in at least one of them."""
    total, last = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, last))
        last = max(last, stop)
    return total


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episodes", description=__doc__)
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--drives", nargs="+", default=["together"])
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
    print("drive    at once  turns  turns/s  engine alone  share  environment ms  between ms")
    for at_once, drive in itertools.product(options.at_once, options.drives):
        found = []
        for commit in measured(words(at_once, drive, options))[1:]:
            turns = (commit.metrics["episode/turns_mean"] or 0.0) * at_once
            both = spans(commit, "rollout", "environment")
            whole = max(stop for _, stop in both) - min(start for start, _ in both)
            engine = covered(spans(commit, "rollout"))
            rounds = commit.metrics["episode/turns_max"] or 1.0
            busy = covered(both)
            found.append(
                (
                    *(turns, turns / whole, turns / engine, engine / whole),
                    *((busy - engine) / rounds * 1000, (whole - busy) / rounds * 1000),
                )
            )
        row = [statistics.median(one) for one in zip(*found, strict=True)]
        print(
            f"{drive:8} {at_once:7} {row[0]:6.0f} {row[1]:8.1f} {row[2]:13.1f} {row[3]:6.2f} "
            f"{row[4]:15.1f} {row[5]:11.1f}",
            flush=True,
        )
    print(f"load {os.getloadavg()[0]:.1f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
