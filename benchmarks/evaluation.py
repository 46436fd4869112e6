"""What evaluating every version costs a step: between the steps, and on a pool of its own.

    python -m benchmarks.evaluation [--engine sleep|real] [--rounds 3] [--steps 6]

Three sides, in turn, as often as there are rounds: no evaluation; `between`, on the run's engines
between two steps; `aside`, on a pool of its own while the steps go on. With --engine sleep the
engines that sample sleep for a second a shard, as on devices of their own: what is left is the flow's
work. With --engine real they decode on this machine's processors, which all pools share: a pool
beside the steps then takes its share of them. The runs share one Prefect server, and one that takes
longer than LIMIT is ended.

Printed after each run, and of all in the end: the median seconds from commit to commit,
without the first two steps of a run; its ratio to no evaluation; and of `aside` the processor seconds
of its pool for each step, as a share of what the machine has in that time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sleeping_engine import VARIABLE
from storage.evaluations.results import evaluations_of
from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore
from storage.tracking.cost import CPU_SECONDS
from tasks.launch.server import EmbeddedServer

SUITE = {
    "source": {"kind": "reasoning_gym", "task": "chain_sum", "size": 16, "seed": 5},
    "rows_per_shard": 8,
    "samples": 4,
    "greedy": False,
}
EVERY = (f"evaluation.suites.sums={json.dumps(SUITE)}", "evaluation.every=1")
POOL = ("cluster.pools.test={workers: 1, threads: 1, slots: 4}", "cluster.roles.evaluation=test")
SIDES: dict[str, tuple[str, ...]] = {"none": (), "between": EVERY, "aside": (*EVERY, *POOL)}
FIRST = 2  # steps of a run that are left out: engines and caches are warm after them
SLEEP = "equal:1.0"  # seconds of a shard
LIMIT = 300.0  # seconds of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run."""

    steps: list[float]  # seconds from commit to commit
    evaluated: int  # versions, each by questions of its own
    processor: float  # seconds of the evaluation's pool for each step; 0 without one


def words(side: str, steps: int) -> list[str]:
    """The recipe tiny with four shards a step."""
    return [
        "tiny",
        f"steps={steps}",
        "prompts_per_step=8",
        "rollout.shards=4",
        "cluster.pools.rollout={workers: 1, threads: 1, slots: 4}",
        "store.snapshot_every=100",
        "train.weight_decay=0.1",  # made-up answers teach nothing, and equal weights are asked once
        *SIDES[side],
    ]


def flow_run(side: str, steps: int, engine: str, server: EmbeddedServer) -> Measured:
    """A run in a folder of its own."""
    module = ["benchmarks.sleeping_engine", "flows.grpo"] if engine == "sleep" else ["flows.grpo"]
    with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "PREFECT_API_URL": f"{server.address}/api",
            "PREFECT_API_AUTH_STRING": server.login,
            VARIABLE: SLEEP,
        }
        log = Path(folder, "log")
        with log.open("w") as out:
            command = [sys.executable, "-m", *module, *words(side, steps)]
            with subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=out
            ) as run:
                try:
                    failed = run.wait(LIMIT) != 0
                except subprocess.TimeoutExpired:
                    run.terminate()  # which ends its workers too
                    failed = True
        if failed:
            raise SystemExit(
                f"{log.read_text()}The run of {side} failed, or took over {LIMIT:.0f} s."
            )
        found = measured(Path(folder), side)
        if found.evaluated != (0 if side == "none" else steps):
            raise SystemExit(
                f"{found.evaluated} evaluations of {side}'s {steps} versions were asked."
            )
        return found


def measured(folder: Path, side: str) -> Measured:
    """What the commits of the run in a folder say."""
    store = Store(f"file://{folder}/.refrain/store")
    (name,) = (one for one in store.children() if not one.startswith("_"))
    files = RunStore(store, name)
    commits = [read_commit(files, step) for step in range(FIRST, (head(files) or 0) + 1)]
    processor = [one.metrics.get(f"{CPU_SECONDS}/test") or 0.0 for one in commits[1:]]
    return Measured(
        steps=[b.committed_at - a.committed_at for a, b in itertools.pairwise(commits)],
        evaluated=len({one.key for one in evaluations_of(files)}),
        processor=statistics.mean(processor) if side == "aside" else 0.0,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", choices=["sleep", "real"], default="sleep")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)
    cores = os.cpu_count() or 1
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
    found: dict[str, list[Measured]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="prefect-") as home:
        server = EmbeddedServer(Path(home))
        server.launch()
        try:
            server.wait()
            for number, side in itertools.product(range(options.rounds), SIDES):
                one = flow_run(side, options.steps, options.engine, server)
                found[side].append(one)
                median = statistics.median(one.steps)
                print(f"round {number + 1}  {side:<8} {median:6.2f} s a step", flush=True)
        finally:
            server.stop()
    report(found, cores)
    print(f"load {os.getloadavg()[0]:.1f} after")
    return 0


def report(found: dict[str, list[Measured]], cores: int) -> None:
    """A line for each side, of all its runs."""
    alone = statistics.median(step for run in found["none"] for step in run.steps)
    for side, runs in found.items():
        seconds = [step for run in runs for step in run.steps]
        median = statistics.median(seconds)
        share = statistics.mean(run.processor for run in runs) / (cores * median)
        print(
            f"{side:<8} {median:6.2f} s a step ({min(seconds):.2f} to {max(seconds):.2f}, "
            f"{len(seconds)} steps)  {median / alone:5.2f} x of none  "
            f"{sum(run.evaluated for run in runs)} evaluations"
            + (f"  its pool has {share:.1%} of the processors" if side == "aside" else "")
        )


if __name__ == "__main__":
    sys.exit(main())
