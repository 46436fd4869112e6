"""What it costs to drive many rollout workers and shards, on the real flow with engines that sleep.

    python -m benchmarks.scale [--workers 1 16 64 256] [--shards 64 256 1024] [--steps 5]
                               [--staleness 2] [--floor]

Rollout workers are simulated, many in one process: each is a Dask worker with an engine host and an
engine of its own, which loads weights as ever (a process scores them once) and then sleeps instead
of decoding. The flow joins them (cluster.kind = address); the Dask scheduler and Prefect's server
are processes of their own.
Every shard takes `--seconds`, so the shortest sampling is ceil(shards / workers) times that.

Printed, medians over the steps but the first: seconds a step; its sampling, from the first shard's
start to the last one's end, beyond the shortest; the flow's own work for each shard in milliseconds
of processor time, and those of the scheduler, of Prefect's server and of the process that writes to
MLflow; the resident memory of the four after the second step, half-way and at the end, so that
`--steps 2000 --shards 16 --seconds 0` shows what a step leaves. With --staleness steps overlap, and
the engines of the next step sample while one trains: what counts then are the seconds a step, beside
shards / workers times what a shard takes.

With --floor, beside it: what Prefect and Dask alone cost a flow of as many task runs and calls that
do nothing (benchmarks/scale_floor.py), in the same minute on the same cluster.

Prefect's server keeps its data in SQLite, or where PREFECT_SERVER_DATABASE_CONNECTION_URL says; a
database server's own processor time is not in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.sleeping_engine import VARIABLE, run
from storage.objects.store import Store
from storage.runs.commit_log import Commit, head, read_commit
from storage.runs.run_store import RunStore
from tasks.reporting.mlflow_process import PROGRAM

LIMIT = 900.0  # seconds for one run beyond six times what its steps take at least
LOOK_EVERY = 0.05  # seconds
IN_A_PROCESS = 64  # simulated workers
PROCESSES = ("flow", "scheduler", "server", "mlflow")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is run."""

    workers: int
    shards: int
    steps: int
    seconds: float  # that each shard takes
    staleness: int  # max_staleness
    group_size: int = 2

    @property
    def shortest(self) -> float:
        """Seconds in which all shards of a step can be sampled."""
        return math.ceil(self.shards / self.workers) * self.seconds

    @property
    def limit(self) -> float:
        """Seconds after which the run is given up."""
        return LIMIT + 6 * self.steps * (1.0 + self.shortest)

    def words(self, scheduler: str) -> list[str]:
        """A tiny model, and a prompt a shard."""
        return [
            "tiny",
            f"steps={self.steps}",
            f"prompts_per_step={self.shards}",
            f"rollout.shards={self.shards}",
            f"group_size={self.group_size}",
            f"data.source.size={max(4096, self.shards)}",
            "rollout.max_new_tokens=4",
            f"cluster={{kind: address, address: '{scheduler}'}}",
            f"cluster.pools.rollout={{workers: {self.workers}, threads: 1, slots: 1}}",
            f"max_staleness={self.staleness}",
            "algorithm.correction=[{kind: truncate}]",
            "store.snapshot_every=100000",
            "train.micro_batch_tokens=16384",
            f"store.uri=file://{Path.cwd()}/.refrain/store",
        ]


def run_one(setting: Setting, scheduler: str) -> int:
    """The flow, in this process, with engines that sleep."""
    import engines.clusters.opening as opening

    opening.check_members = lambda cluster: None  # it wants a nanny for every worker
    return run(setting.words(scheduler))


def host_workers(scheduler: str, names: Sequence[str], pool: str, slots: int) -> None:
    """Be some Dask workers, all in this process, until the scheduler is gone."""
    from engines.processes import dask_settings

    dask_settings.apply()
    from distributed import Worker

    async def serve() -> None:
        made = [
            Worker(
                scheduler,
                name=name,
                nthreads=slots,
                resources={pool: slots},
                memory_limit=0,
                local_directory=f"scratch/{name}",
                dashboard_address="127.0.0.1:0",
                dashboard=False,
            )
            for name in names
        ]
        await asyncio.gather(*made)
        await asyncio.gather(*(worker.finished() for worker in made))

    asyncio.run(serve())


@contextlib.contextmanager
def cluster(setting: Setting, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Scheduler and workers in processes of their own: its address and its process."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        VARIABLE: f"equal:{setting.seconds}",
        # Each simulated worker would look at this machine twice a second.
        "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "60s",
        "OMP_NUM_THREADS": "1",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    serve = ["-m", "engines.clusters.scheduler", "--host", "127.0.0.1", "--port", str(port)]
    rollout = [f"rollout-{number}" for number in range(setting.workers)]
    parts = [rollout[i : i + IN_A_PROCESS] for i in range(0, len(rollout), IN_A_PROCESS)]
    wanted = [("rollout", 1, part) for part in parts]
    wanted += [("train", 2, ["train-0"]), ("cpu", 4, ["cpu-0"])]
    hosts = [
        ["-m", "benchmarks.scale", "--host", address, pool, str(slots), *names]
        for pool, slots, names in wanted
    ]
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "cluster.log").open("ab") as log:
        try:
            for words in [[*serve, "--no-dashboard"], *hosts]:
                started.append(
                    subprocess.Popen(
                        [sys.executable, *words],
                        cwd=folder, env=environment, stdout=log, stderr=log,
                    )
                )  # fmt: skip
            yield address, psutil.Process(started[0].pid)
        finally:
            for process in reversed(started):
                process.kill()
                process.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Processor seconds so far, when a step was seen to be committed."""

    when: float
    spent: tuple[float, ...]  # by PROCESSES
    memory: tuple[float, ...]  # MiB


def look(flow: psutil.Process, scheduler: psutil.Process) -> Look:
    """At the processes; below the flow are MLflow's process and Prefect's server."""
    below = flow.children(recursive=True)
    mlflow = [child for child in below if writes_to_mlflow(child)]
    each = [[flow], [scheduler], [child for child in below if child not in mlflow], mlflow]
    return Look(
        when=time.time(),
        spent=tuple(sum(spent(one) for one in processes) for processes in each),
        memory=tuple(sum(resident(one) for one in processes) for processes in each),
    )


def writes_to_mlflow(process: psutil.Process) -> bool:
    """Whether it is that of tasks/reporting/mlflow_process.py."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(PROGRAM.main.partition(":")[0] in word for word in process.cmdline())
    return False


def resident(process: psutil.Process) -> float:
    """MiB of one process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(process.memory_info().rss) / 2**20
    return 0.0


def spent(process: psutil.Process) -> float:
    """Processor seconds of one process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


def measured(setting: Setting, floor: bool) -> tuple[dict[str, float], str]:
    """One run in a folder of its own: its figures, and memory."""
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        with cluster(setting, folder) as (scheduler, process):
            command = [sys.executable, "-m", "benchmarks.scale", "--one", scheduler]
            command += ["--workers", str(setting.workers), "--shards", str(setting.shards)]
            command += ["--steps", str(setting.steps), "--seconds", str(setting.seconds)]
            command += ["--staleness", str(setting.staleness)]
            log = folder / "flow.log"
            with log.open("wb") as out:
                flow = subprocess.Popen(
                    command,
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                    stdout=out,
                    stderr=out,
                )
            try:
                looks = watched(flow, process, folder, setting)
                if flow.wait(LIMIT) != 0:
                    raise SystemExit(log.read_text() + (folder / "cluster.log").read_text()[-3000:])
            finally:
                if flow.poll() is None:
                    flow.kill()
                    flow.wait()
            found = figures(setting, commits_of(folder), looks)
            if floor:
                found |= floor_beside(setting, scheduler, folder)
            return found, memory(looks)


def floor_beside(setting: Setting, scheduler: str, folder: Path) -> dict[str, float]:
    """Task runs of a step, and milliseconds of a bare flow with as many, for each shard."""
    with sqlite3.connect(folder / ".refrain" / "prefect" / "prefect.db") as database:
        (count,) = database.execute("select count(*) from task_run").fetchone()
    task_runs = round(count / setting.steps)
    words = [scheduler, setting.workers, setting.shards, task_runs, max(setting.steps, 4)]
    bare = folder / "bare"
    bare.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale_floor", *map(str, words)],
        cwd=bare,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=setting.limit,
    )
    seconds = float(done.stdout.split("seconds")[1])
    return {"task_runs": float(task_runs), "floor": 1000.0 * seconds / setting.shards}


def watched(
    flow: subprocess.Popen[bytes], scheduler: psutil.Process, folder: Path, setting: Setting
) -> list[Look]:
    """A look at the processes after each commit."""
    found: list[Look] = []
    process, began, seen = psutil.Process(flow.pid), time.monotonic(), 0
    while seen < setting.steps and flow.poll() is None:
        if time.monotonic() - began > setting.limit:
            raise SystemExit(f"No end in {setting.limit:g} s.")
        files = run_in(folder)
        newest = (head(files) or 0) if files is not None else 0
        if newest > seen:
            found.append(look(process, scheduler))
            seen = newest
        time.sleep(LOOK_EVERY)
    return found


def run_in(folder: Path) -> RunStore | None:
    """The run, once it is there."""
    store = Store(f"file://{folder}/.refrain/store")
    names = store.children()
    return RunStore(store, names[0]) if names else None


def commits_of(folder: Path) -> list[Commit]:
    """The run's last commits."""
    files = run_in(folder)
    assert files is not None
    last = head(files) or 0
    return [read_commit(files, step) for step in range(max(1, last - 19), last + 1)]


def figures(setting: Setting, commits: Sequence[Commit], looks: Sequence[Look]) -> dict[str, float]:
    """Medians over the steps but the first; of the sampling over the last twenty."""
    sampling = []
    for commit in commits[1:]:
        shards = [one for one in commit.attempts if one["stage"] == "rollout"]
        began = min(float(str(one["started"])) for one in shards)
        ended = max(float(str(one["started"])) + float(str(one["seconds"])) for one in shards)
        sampling.append(ended - began)
    pairs = list(itertools.pairwise(looks))
    each = 1000.0 / setting.shards
    return {
        "step": statistics.median(b.when - a.when for a, b in pairs),
        "beyond": statistics.median(sampling) - setting.shortest,
        **{
            name: each * statistics.median(b.spent[at] - a.spent[at] for a, b in pairs)
            for at, name in enumerate(PROCESSES)
        },
        "requests": median_of(commits, "store/requests") / setting.shards,
        "kib": (median_of(commits, "store/bytes_read") + median_of(commits, "store/bytes_written"))
        / setting.shards
        / 1024,
    }


def median_of(commits: Sequence[Commit], metric: str) -> float:
    """Over the steps but the first."""
    return statistics.median(commit.metrics[metric] or 0.0 for commit in commits[1:])


def memory(looks: Sequence[Look]) -> str:
    """MiB of each after the second step, half-way and at the end."""
    moments = [looks[min(1, len(looks) - 1)], looks[len(looks) // 2], looks[-1]]
    return "   ".join(
        " ".join(f"{one.memory[process]:.0f}" for one in moments)
        for process in range(len(PROCESSES))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--host"]:
        host_workers(words[1], words[4:], words[2], int(words[3]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--shards", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each shard takes")
    parser.add_argument("--staleness", type=int, default=0, help="max_staleness")
    parser.add_argument("--floor", action="store_true", help="Prefect and Dask alone, beside it")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    settings = [
        Setting(
            workers=workers,
            shards=shards,
            steps=options.steps,
            seconds=options.seconds,
            staleness=options.staleness,
        )
        for workers in options.workers
        for shards in options.shards
    ]
    if options.one:
        return run_one(settings[0], options.one)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
    print("MiB: after the second step, half-way, at the end, of flow, scheduler, server, MLflow")
    print("store: requests and KiB read and written for a shard, of all processes")
    print(
        "workers shards  s a step  beyond  flow ms  scheduler ms  server ms  MLflow ms  store  MiB"
    )
    for setting in settings:
        found, mib = measured(setting, options.floor)
        print(
            f"{setting.workers:7} {setting.shards:6}  {found['step']:8.2f}  {found['beyond']:6.2f}  "
            f"{found['flow']:7.1f}  {found['scheduler']:12.1f}  {found['server']:9.1f}  "
            f"{found['mlflow']:9.1f}  "
            f"{found['requests']:.1f} {found['kib']:.1f}  "
            f"{mib}",
            flush=True,
        )
        if options.floor:
            print(
                f"        of the flow's, Prefect and Dask alone: {found['floor']:.1f} ms, with "
                f"{found['task_runs']:.0f} task runs a step",
                flush=True,
            )
    print(f"load {os.getloadavg()[0]:.1f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
