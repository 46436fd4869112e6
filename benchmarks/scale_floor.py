"""What Prefect and Dask alone cost the process of a flow: as many task runs and calls, and no work.

    python -m benchmarks.scale --floor     (which calls this module beside each of its runs)

A flow whose steps are flows of so many task runs, of which eight drive the shards: for each a Dask
task on a worker that returns what it is given, two kilobytes, submitted and waited for in a thread of
its own. Nothing is computed, stored, logged or shown; the settings of Dask are Refrain's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines.processes import dask_settings

DRIVERS = 8  # task runs that have shards; see tasks.run.shard_driver
NBYTES = 2000  # of what goes to a worker, and comes back


def echo(value: str) -> str:
    """On a worker."""
    return value


def spent_on_steps(
    address: str, pool: str, workers: int, shards: int, task_runs: int, steps: int
) -> float:
    """Seconds of this process's time that a step takes, the median of all but the first.

    Args:
        address: of the Dask scheduler.
        pool: of the workers that take the calls, a slot each.
        task_runs: of a step.
    """
    dask_settings.apply()
    from distributed import Client
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    from tasks.launch.command_line import quiet_libraries
    from tasks.launch.server import prefect_server

    quiet_libraries()
    client = Client(address)
    found = client.scheduler_info(n_workers=-1)["workers"].items()
    at = [where for where, one in found if pool in one["resources"]][:workers]
    value = "x" * NBYTES
    threads = ThreadPoolExecutor(shards)

    def call(shard: int) -> str:
        future = client.submit(
            echo,
            value,
            key=f"echo-{uuid.uuid4().hex}",
            workers=[at[shard % len(at)]],
            allow_other_workers=False,
            resources={pool: 1},
            pure=False,
            retries=0,
        )
        try:
            answer: str = future.result()
            return answer
        finally:
            future.release()

    @task(persist_result=False, cache_policy=NO_CACHE)
    def drive(first: int, last: int) -> int:
        return len(list(threads.map(call, range(first, last))))

    @task(persist_result=False, cache_policy=NO_CACHE)
    def nothing(number: int) -> int:
        return number

    @flow(flow_run_name="step {number}", validate_parameters=False, persist_result=False)
    def step(number: int) -> int:
        edges = [shards * part // DRIVERS for part in range(DRIVERS + 1)]
        driven = [drive.submit(a, b) for a, b in itertools.pairwise(edges)]
        count = sum(one.result() for one in driven)
        others = [nothing.submit(one) for one in range(max(0, task_runs - DRIVERS))]
        return count + len([one.result() for one in others])

    took: list[float] = []

    @flow(persist_result=False)
    def run() -> None:
        for number in range(steps):
            before = time.process_time()
            step(number)
            took.append(time.process_time() - before)

    with prefect_server(Path.cwd() / ".refrain" / "prefect"):
        run()
    client.close()
    return statistics.median(took[1:])


def main(words: Sequence[str]) -> int:
    """Print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    for name in ("workers", "shards", "task_runs", "steps"):
        parser.add_argument(name, type=int)
    given = parser.parse_args(words)
    print(
        "seconds",
        spent_on_steps(
            given.address, "rollout", given.workers, given.shards, given.task_runs, given.steps
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
