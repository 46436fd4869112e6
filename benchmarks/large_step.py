"""A large step without a model: draw, reward, advantage and the update's plan, by stage and process.

    python -m benchmarks.large_step [--prompts 10000] [--group 16] [--tokens 2000] [--workers 2]

The tasks, the store and the local cluster are a run's own; the samples are drawn ids. Prints, as
JSON, the seconds of each stage, and the peak resident memory of each process while it went.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from prefect import flow

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from engines.rollout.contract import ShardStats
from engines.train.batching.mfu import CostModel
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store
from storage.runs.weights import WeightsRef
from tasks.advantage import advantage
from tasks.draw import draw
from tasks.launch.server import prefect_server
from tasks.reporting.listeners import reporting_on
from tasks.reporting.terminal import Terminal
from tasks.results import Sampled
from tasks.reward import reward
from tasks.run.life_cycle import close
from tasks.run.opening import begin, open_run, take_over
from tasks.run.roles import SCORER
from tasks.run.run import Run
from tasks.run.stage import spread
from tasks.update import plan_of

RANKS, BUDGET = 8, 16_384  # of the update that is planned
COST = CostModel(
    per_token=2e9, per_response_token=2e8, per_square=1e5
)  # about 1 billion parameters
LOOK = 0.2  # seconds between looks at the memory
VOCABULARY = (4, 90)


def drawn(uri: str, prompts: BatchRef, key: str, group: int, tokens: int, seed: int) -> BatchRef:
    """Samples of some prompts: drawn ids, as many as a lognormal says, about `tokens` each."""
    random, count = np.random.default_rng(seed), len(prompts) * group
    lengths = np.clip(random.lognormal(np.log(tokens) - 0.125, 0.5, count), 1, 4 * tokens)
    offsets = np.concatenate([[0], lengths.astype(np.int64).cumsum()])
    total = int(offsets[-1])
    columns: dict[str, object] = {
        "response_ids": Jagged(random.integers(*VOCABULARY, total, dtype=np.int32), offsets),
        "rollout_logprobs": Jagged(-random.random(total, dtype=np.float32), offsets),
        "response_mask": Jagged(np.ones(total, np.uint8), offsets),
        "weight_spans": [[0, 0, int(n)] for n in np.diff(offsets)],
        "sample_id": seed * count + np.arange(count),
        "status": np.zeros(count, np.int64),
    }
    written = write_batch(Store(uri), key, columns)
    repeated = prompts[["prompt_ids", "group_id", "prompt_row"]]
    return repeated.take(np.repeat(np.arange(len(prompts)), group)).with_columns(written)


class Memory:
    """Peak resident memory of the flow's process and of all that it started, by stage."""

    def __init__(self, names: dict[int, str]) -> None:
        self.peaks: dict[str, dict[str, float]] = {}
        self.seconds: dict[str, float] = {}
        self._names = names
        self._stage, self._began = "", time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def stage(self, name: str) -> None:
        """What follows is of this stage."""
        now = time.monotonic()
        if self._stage:
            self.seconds[self._stage] = now - self._began
        self._stage, self._began = name, now

    def end(self) -> None:
        """No more looks."""
        self.stage("")
        self._ended.set()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._ended.wait(LOOK):
            stage = self._stage
            for process in (me, *me.children(recursive=True)):
                try:
                    mib = process.memory_info().rss / 2**20
                    name = self._name(process)
                except psutil.Error:  # it has ended meanwhile
                    continue
                if stage:
                    peaks = self.peaks.setdefault(stage, {})
                    peaks[name] = max(peaks.get(name, 0.0), mib)

    def _name(self, process: psutil.Process) -> str:
        if process.pid in self._names:
            return self._names[process.pid]
        parent = self._names.get(process.ppid(), "")
        return f"reward function of {parent}" if parent.startswith("cpu") else "others"


def processes(run: Run) -> dict[int, str]:
    """Process id -> name, of the flow and the cpu workers."""
    cluster = run.engines.cluster
    pids = cluster.client.run(os.getpid)
    names = {pids[address]: name for name, address in cluster.workers("cpu").items()}
    return {os.getpid(): "flow", **names}


@flow(name="large-step")
def large_step(run: Run, group: int, tokens: int, shard_prompts: int) -> dict[str, Any]:
    """One step's stages, one after the other."""
    run.engines.wait("reward")
    memory = Memory(processes(run))
    memory.stage("draw")
    prompts = draw.submit(run, 1).result()
    memory.stage("(samples are drawn)")
    parts = prompts.ref.chunk(-(-len(prompts.ref) // shard_prompts))
    keys = [run.files.stage_key(1, "rollout", n, "drawn") for n in range(len(parts))]
    with ProcessPoolExecutor(2) as pool:
        refs = list(
            pool.map(
                drawn,
                [run.store.uri] * len(parts),
                parts,
                keys,
                [group] * len(parts),
                [tokens] * len(parts),
                range(len(parts)),
            )
        )
    weights = WeightsRef(version=0, key="none", digest="none", nbytes=0)
    sampled = [
        Sampled(prompts=part, weights=weights, ref=ref, stats=_stats(ref))
        for part, ref in zip(parts, refs, strict=True)
    ]
    memory.stage("reward")
    scoring = [
        reward.submit(run, 1, (shard,), n, len(sampled)) for n, shard in enumerate(sampled, 1)
    ]
    scored = [one.result() for one in scoring]
    memory.stage("advantage")
    batch = advantage.submit(run, 1, scored, None).result()
    memory.stage("plan")
    config = run.config.train.model_copy(update={"micro_batch_tokens": BUDGET})
    part = plan_of(run, 1, batch, "update", RANKS, config, COST)
    plan = spread(run, 1, "update", [part], BatchRef)[0]
    memory.end()
    attempts = run.attempts_of(1)
    return {
        "samples": len(batch.ref),
        "response_tokens": int(batch.ref.lengths(run.store, "response_ids").sum()),
        "micro_batches": len(plan),
        "calls": {
            stage: len([a for a in attempts if a.stage == stage])
            for stage in dict.fromkeys(a.stage for a in attempts)
        },
        "workers": {
            stage: sorted({a.assignment.worker for a in attempts if a.stage == stage})
            for stage in dict.fromkeys(a.stage for a in attempts)
        },
        "seconds": {name: round(value, 1) for name, value in memory.seconds.items()},
        "peak_mib": {
            stage: {name: round(mib) for name, mib in sorted(peaks.items())}
            for stage, peaks in memory.peaks.items()
        },
    }


def _stats(ref: BatchRef) -> ShardStats:
    return ShardStats(
        rows=len(ref), prompt_tokens=0, tokens=0, truncated=0, seconds=0.0, worker="drawn",
        attempt=1, version=0, digest="none", unfinished=0, oldest=0,
    )  # fmt: skip


def settings(given: argparse.Namespace, folder: Path) -> GRPOConfig:
    """The recipe tiny with so many prompts, and a pool of so many cpu workers."""
    here = "benchmarks.large_step_functions"
    return load_recipe(
        GRPOConfig,
        "tiny",
        [
            "name=large-step",
            "steps=1",
            f"prompts_per_step={given.prompts}",
            f"group_size={given.group}",
            f"store.uri={(folder / 'store').as_uri()}",
            f"tracking.uri=sqlite:///{folder / 'mlflow.db'}",
            "data.source.kind=function",
            f"data.source.path={here}:rows",
            f"data.source.params.count={given.prompts}",
            "data.prompt_column=question",
            "rewards.functions.0.kind=function",
            f"rewards.functions.0.path={here}:by_first_token",
            "rewards.timeout=600",
            f"rollout.max_new_tokens={4 * given.tokens}",
            f"cluster.pools.cpu.workers={given.workers}",
        ],
    )


def main() -> None:
    """Measure in a folder of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("prompts", 10_000), ("group", 16), ("tokens", 2_000), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shard-prompts", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = settings(given, Path(folder))
        opened = open_run("benchmarks.large_step:large_step", config)
        lease, position = take_over(opened)
        begin(opened, position)
        run = Run(opened, lease, position, reporting_on(Terminal()))
        run.engines.starting = [SCORER.name]  # no engine that holds a model
        try:
            run.engines.launch()
            with prefect_server(Path(folder) / "prefect"):
                found = large_step(run, given.group, given.tokens, given.shard_prompts)
            print(json.dumps(found, indent=1))
        finally:
            close(run, None)


if __name__ == "__main__":
    main()
