"""Elastic training: the aggregator's memory, a step against all-reduce, gradients stored in bfloat16.

    python -m benchmarks.elastic memory [--units 4 16 64]   peaks of an aggregator by number of units
    python -m benchmarks.elastic step [--repeats 5]         two workers against two ranks over Gloo
    python -m benchmarks.elastic bfloat16 [--steps 10]      weights after steps with either format

A random Llama of --layers and --hidden, in float32, on a CPU. Memory is that of a process of its own
for each number of units: `anonymous` is what it has taken, `resident` has the pages of mapped files
too, which the system takes back as it likes. The bytes of all-reduce are counted, not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from configs.algorithm.algorithm import AlgorithmConfig
from configs.cluster import ClusterConfig, PoolConfig, RolesConfig
from configs.model import RandomModel
from configs.train import TrainConfig
from engines.train.contract import TrainSpec, UpdateRequest
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.gradients import remove_gradients
from storage.runs.run_store import RunStore

MIB = 2**20
GIVEN: dict[str, Any] = {
    "algorithm": AlgorithmConfig(),
    "temperature": 1.0,
    "max_new_tokens": 96,
}
ALONE: dict[str, Any] = {
    "rank": 0,
    "world": 1,
    "host": "127.0.0.1",
    "port": 0,
    "generation": 1,
    "timeout": 60.0,
}


def spec(options: argparse.Namespace, folder: Path, run: str = "run", **train: Any) -> TrainSpec:
    settings = {"learning_rate": 1e-3, "compute_dtype": "float32", "micro_batch_tokens": 512}
    return TrainSpec(
        model=RandomModel(
            layers=options.layers, hidden_size=options.hidden, heads=options.hidden // 64, seed=5
        ),
        model_cache=str(folder / "models"),
        train=TrainConfig(**{**settings, **train}),
        role="actor",
        store_uri=str(folder / "store"),
        run=run,
    )


def batch_of(folder: Path, groups: int, seed: int = 0) -> BatchRef:
    """Groups of four answers of 48 to 96 tokens to a prompt of 24."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(4, 90, 24) for _ in range(groups) for _ in range(4)]
    responses = [random.integers(4, 90, int(random.integers(48, 97))) for _ in prompts]
    columns: dict[str, object] = {
        "prompt_ids": [prompts[number - number % 4] for number in range(len(prompts))],
        "response_ids": responses,
        "advantages": [np.full(len(one), random.normal(), np.float32) for one in responses],
        "group_id": np.repeat(np.arange(groups), 4),
    }
    return write_batch(Store(str(folder / "store")), f"run/batch-{seed}.safetensors", columns)


# --- memory -----------------------------------------------------------------------------------------


def fill_units(options: argparse.Namespace, folder: Path, units: int) -> None:
    """Leave random gradients of so many units for an aggregator, and print its peaks as JSON."""
    import torch

    from engines.elastic.aggregator import Aggregator
    from engines.elastic.gradients import write_gradient
    from engines.train.contract import MadeOn
    from storage.objects.documents import key_of
    from storage.runs.gradients import UnitMetrics

    aggregator = Aggregator(
        spec(options, folder, engine="elastic", unit_tokens=160, micro_batch_tokens=160)
    )
    aggregator.join(**ALONE)
    batch = batch_of(folder, groups=units)
    request = UpdateRequest(step=1, batch=batch, **GIVEN)
    aggregator.open_update(request)
    offered = aggregator.offer(1)
    chosen = offered.units[:units]
    assert len(chosen) == units, f"the batch has {len(offered.units)} units"
    files = RunStore(Store(str(folder / "store")), "run")
    shapes = {name: p.shape for name, p in aggregator._trained().parameters.items()}
    nothing = UnitMetrics(
        means={}, sums={}, maxima={}, finite=True, tokens=1, whole=1, responses=1, flops=1.0
    )
    for unit in chosen:
        torch.manual_seed(unit.number)
        write_gradient(
            files,
            offered.folder,
            offered.of,
            unit.number,
            key_of(list(unit.rows)),
            {name: torch.randn(shape) for name, shape in shapes.items()},
            torch.float32,
            MadeOn(device="CPU", torch="", fixed=True),
            nothing,
        )
    opened = aggregator._now()
    opened.offered = replace(offered, units=chosen)
    with Peaks() as peaks:
        began = time.perf_counter()
        assert aggregator.apply().refused == {}
        seconds = time.perf_counter() - began
    print(json.dumps({"units": units, "seconds": seconds, **peaks.found}))


class Peaks:
    """The most memory of this process while it is open, in MiB, beyond what it had before."""

    def __enter__(self) -> Peaks:
        self._before = memory()
        self.found = dict.fromkeys(self._before, 0.0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            for name, now in memory().items():
                self.found[name] = max(self.found[name], now)


def memory() -> dict[str, float]:
    """MiB that this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return {
        "anonymous": int(sizes["RssAnon"]) / 1024,
        "resident": int(sizes["VmRSS"]) / 1024,
    }


def measure_memory(options: argparse.Namespace) -> None:
    """A process for each number of units."""
    print(f"{'units':>6} {'anonymous MiB':>14} {'resident MiB':>13} {'seconds':>8}")
    for units in options.units:
        with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
            words = ["one", "--folder", folder, "--units", str(units)]
            sizes = ["--layers", str(options.layers), "--hidden", str(options.hidden)]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.elastic", *words, *sizes],
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{units:>6} {found['anonymous']:>14.1f} {found['resident']:>13.1f} "
            f"{found['seconds']:>8.2f}",
            flush=True,
        )


# --- a step -----------------------------------------------------------------------------------------


def measure_step(options: argparse.Namespace) -> None:
    """Seconds and bytes of an update, by two ranks and by two workers with an aggregator."""
    from engines.clusters.opening import open_cluster
    from engines.elastic.contract import GradientAggregator, GradientWorker
    from engines.elastic.trainer import ElasticTrainer
    from engines.train.contract import TrainEngine
    from engines.train.trainer import Trainer, TrainerSettings
    from engines.workers.engine import EngineSpec
    from engines.workers.gang import Gang
    from engines.workers.pool import EnginePool

    config = ClusterConfig(
        pools={"train": PoolConfig(workers=2), "sum": PoolConfig()},
        roles=RolesConfig(
            actor="train", aggregator="sum", ref="train", rollout="train", reward="sum"
        ),
    )
    modules = ("engines.elastic.worker", "engines.elastic.aggregator")
    with (
        tempfile.TemporaryDirectory(prefix="elastic-") as name,
        open_cluster(config, preload=modules) as cluster,
    ):
        folder = Path(name)
        batch = batch_of(folder, groups=8)
        settings = TrainerSettings(epoch=1, temperature=1.0, max_new_tokens=GIVEN["max_new_tokens"])
        limits: dict[str, Any] = {"start_timeout": 120.0}
        sides: dict[str, Trainer] = {}
        for side in ("fsdp", "elastic", "elastic-bf16"):
            files = RunStore(Store(str(folder / "store")), side)
            files.write_run({"config": {}})
            extra: dict[str, Any] = {}
            if side != "fsdp":
                dtype = "bfloat16" if side.endswith("bf16") else "float32"
                extra = {"engine": "elastic", "unit_tokens": 1024, "gradient_dtype": dtype}
            given = spec(options, folder, side, **extra)
            if side == "fsdp":
                engine = EngineSpec.of("engines.train.fsdp_engine:FSDPEngine", given, TrainEngine)
                gang = Gang(cluster, "train", side, engine, 300.0, **limits)
                sides[side] = Trainer(gang, files, settings)
                continue
            adds = EngineSpec.of("engines.elastic.aggregator:Aggregator", given, GradientAggregator)
            worker = EngineSpec.of("engines.elastic.worker:GradientEngine", given, GradientWorker)
            summing = Gang(cluster, "sum", side, adds, 300.0, **limits, world=1)
            pool = EnginePool(cluster, "train", f"{side}-g", worker, deadline=300.0, **limits)
            sides[side] = ElasticTrainer(
                summing, files, pool, settings, unit_tokens=1024, lease=300.0
            )
        for side, trainer in sides.items():
            show_step(side, trainer, batch, options, cluster.usage)


def show_step(
    side: str, trainer: Any, batch: BatchRef, options: argparse.Namespace, usage: Any
) -> None:
    """Time updates after one that warms up."""
    seconds, result = [], None
    for step in range(1, options.repeats + 2):
        before = sum(one.bytes_read + one.bytes_written for one in usage.values())
        began = time.perf_counter()
        result = trainer.update(step, batch, AlgorithmConfig())
        if step > 1:
            seconds.append(time.perf_counter() - began)
        moved = sum(one.bytes_read + one.bytes_written for one in usage.values()) - before
        remove_gradients(trainer._files, step)
    assert result is not None
    units = int(result.metrics.get("elastic/units", 0))
    summed = result.metrics.get("elastic/sum_seconds", 0.0)
    print(
        f"{side:<14} median {statistics.median(seconds):6.2f} s, {min(seconds):.2f} to "
        f"{max(seconds):.2f}; store {moved / MIB:7.1f} MiB; {units} units, "
        f"sum and step {summed:.2f} s; {int(result.metrics['train/tokens'])} tokens",
        flush=True,
    )


# --- bfloat16 ---------------------------------------------------------------------------------------


def measure_bfloat16(options: argparse.Namespace) -> None:
    """How far weights are apart after the same steps with gradients stored in either format."""
    import torch

    from engines.elastic.aggregator import Aggregator
    from engines.elastic.worker import GradientEngine
    from engines.train.model.fsdp import own_part

    found: dict[str, dict[str, Any]] = {}
    norms: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        for dtype in ("float32", "bfloat16"):
            settings = {"engine": "elastic", "unit_tokens": 512, "gradient_dtype": dtype}
            given = spec(options, folder, dtype, **settings)
            aggregator, worker = Aggregator(given), GradientEngine(given)
            aggregator.join(**ALONE)
            parameters = aggregator._trained().parameters
            found.setdefault("begin", {n: own_part(p)[0].clone() for n, p in parameters.items()})
            norms[dtype] = []
            for step in range(1, options.steps + 1):
                batch = batch_of(folder, groups=8, seed=step)
                request = UpdateRequest(step=step, batch=batch, **GIVEN)
                aggregator.open_update(request)
                offered = aggregator.offer(step)
                for unit in offered.units:
                    worker.gradient(offered, unit, request)
                assert aggregator.apply().refused == {}
                norms[dtype].append(aggregator.close_update().metrics["train/grad_norm"])
                remove_gradients(RunStore(Store(str(folder / "store")), dtype), step)
            found[dtype] = {n: own_part(p)[0].clone() for n, p in parameters.items()}
            aggregator.close()
            worker.close()

    def apart(a: str, b: str) -> float:
        return sum(float((found[a][n] - found[b][n]).abs().sum()) for n in found[a])

    share = apart("float32", "bfloat16") / apart("float32", "begin")
    ratios = torch.tensor(norms["bfloat16"]) / torch.tensor(norms["float32"]) - 1
    print(
        f"{options.steps} steps, {len(offered.units)} units: {share:.2%} of the way; gradient norms "
        f"differ by at most {float(ratios.abs().max()):.2e} of their size, in the first step by "
        f"{float(ratios[0].abs()):.2e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("memory", "step", "bfloat16", "one"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--units", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "one":
        fill_units(options, options.folder, options.units[0])
        return
    measures = {"memory": measure_memory, "step": measure_step, "bfloat16": measure_bfloat16}
    measures[options.what](options)


if __name__ == "__main__":
    main()
