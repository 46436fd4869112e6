"""A short GRPO run of a model of real size, trainer and vLLM on one GPU: seconds by stage.

    python -m benchmarks.gpu_flow --shape 1.5b --folder DIR --json FILE [--steps 3] [--seconds 88]
                                  [--trace] [--set KEY=VALUE …]
    python -m benchmarks.gpu_flow --small --folder DIR      runs in small, on a CPU too

`flows.grpo` itself, in a process of its own: 32 prompts of 8 samples with 256 tokens each, a random
model (nobody learns anything), and the reward that every flow has at hand. `--set` are further
settings of the run. DIR may be that of benchmarks.gpu_sampling, whose model is taken then; the run
has a store of its own in it.

A line of JSON after each step, by what its commit says, which FILE gets too. The NVML share is the
mean of NVML's utilisation of the GPU at 10 Hz: the share of its sample periods in which some kernel
ran, not the union of the kernels' intervals; a stage's is that of the time in which its tasks ran,
where stages may overlap. With `--trace` the last line but one has that union over wall time, by
torch's profiler in all processes (gpu_trace.py), from after the first step to the last commit; the
steps have what the profiler costs then. The run is ended after the last of the steps, or after so
many seconds; what is committed has been told by then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_busy import Device, Watch
from benchmarks.gpu_sampling import GRAPHS
from benchmarks.gpu_trace import Seen, Trace, busy
from engines.processes.process_tree import descendants, kill_all, session
from storage.objects.errors import ObjectMissing
from storage.objects.store import Store
from storage.runs.commit_log import Commit, read_commit
from storage.runs.run_store import RunStore

ROOT = Path(__file__).parents[1]
LOOK = 0.1  # seconds between looks at what is committed
GRACE = 5.0  # seconds in which a flow that is told to end does so
# Metrics of a commit that are told beside the times: name -> what it is called.
TOLD = {
    "rollout/tokens": "tokens",
    "rollout/tokens_per_second": "rollout_tokens_per_second",
    "train/tokens_per_second": "train_tokens_per_second",
    "train/mfu": "mfu",
    "cost/gpu_busy/gpu": "gpu_busy",
    "reward/mean": "reward",
}
DRAW = """
import sys, pathlib
from benchmarks.gpu_job import drawn
drawn(sys.argv[1], pathlib.Path(sys.argv[2]))
"""


def settings(shape: str, folder: Path, steps: int) -> dict[str, Any]:
    """The run's, of a random model whose vLLM has a quarter of the device."""
    small = shape == "small"
    rollout: dict[str, Any] = {"ignore_eos": True, "shards": 4 if small else 8}
    rollout |= {"max_new_tokens": 16 if small else 256, "probe_tolerance": 1.0}
    train: dict[str, Any] = {"learning_rate": 1e-6, "micro_batch_tokens": 8192}
    pool: dict[str, Any] = {"workers": 1, "gpus": 1, "threads": 8}
    if small:
        rollout |= {"dtype": "float32", "kv_cache_gib": 0.1, "max_sequences": 16}
        train["compute_dtype"] = "float32"
        pool = {"workers": 1, "threads": 1, "slots": 5}
    else:
        rollout["gpu_memory_utilization"] = 0.25
        rollout["engine_args"] = {"compilation_config": {"cudagraph_capture_sizes": GRAPHS}}
    problems = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 4}
    return {
        "name": "gpu-flow",
        "seed": 1,
        "steps": steps
        + 1,  # with the last one the trainer's state is stored, and it is ended before
        "prompts_per_step": 4 if small else 32,
        "group_size": 4 if small else 8,
        "model": {"kind": "pretrained", "path": str(folder / "models" / shape)},
        "data": {
            "source": {
                "kind": "reasoning_gym",
                "task": "chain_sum",
                "size": 1000,
                "seed": 7,
                "params": problems,
            },
            "template": "plain",
            # None is as long. With it a sample is at most as long as in benchmarks.gpu_sampling, and
            # what vLLM compiled there is found.
            "max_prompt_tokens": 128 if small else 512,
        },
        "rewards": {
            "functions": [{"kind": "function", "path": "engines.rewards.builtin:share_of_digits"}]
        },
        "rollout": rollout,
        "train": train,
        "cluster": {
            "pools": {"gpu": pool, "cpu": {"workers": 1 if small else 2, "threads": 1, "slots": 8}},
            "roles": {"actor": "gpu", "ref": "gpu", "rollout": "gpu", "reward": "cpu"},
        },
        "store": {"uri": f"file://{folder}/flow/store", "snapshot_every": 1000},
    }


def told(commit: Commit, began: float, watch: Watch | None) -> dict[str, Any]:
    """A step as a line; `began`: when the one before was committed, in seconds since the epoch."""
    metrics = commit.metrics
    stages = {
        name.removeprefix("time/"): round(seconds, 3)
        for name, seconds in metrics.items()
        if name.startswith("time/") and name != "time/step" and seconds is not None
    }
    found: dict[str, Any] = {
        "measurement": "flow_step",
        "step": commit.step,
        "seconds": metrics.get("time/step"),
        "since_the_last_commit": round(commit.committed_at - began, 3),
        "stages": stages,
        "update": {
            name.removeprefix("train/"): round(seconds, 3)
            for name, seconds in metrics.items()
            if name.startswith("train/") and name.endswith("_seconds") and seconds is not None
        },
        "weights": {
            name.removeprefix("weights/"): round(value, 4)
            for name, value in metrics.items()
            if name.startswith("weights/") and value is not None
        },
        **{called: metrics[name] for name, called in TOLD.items() if name in metrics},
    }
    if watch is not None:
        share = watch.share(began, commit.committed_at)
        found["nvml_share"] = None if share is None else round(share, 4)
        found["nvml_share_of_stages"] = {
            stage: round(share, 4)
            for stage, (start, end) in sorted(spans(commit).items())
            if (share := watch.share(start, end)) is not None
        }
    return found


def traced(seen: Mapping[int, Seen], end: float) -> dict[str, Any]:
    """A trace as a line, of the time from when all processes were looked at to `end`."""
    begin = max((one.begin for one in seen.values()), default=end)
    share = busy(seen.values(), begin, end)
    return {
        "busy": None if share is None else round(share, 4),
        "seconds": round(end - begin, 2),
        "events_by_process": sorted(one.events for one in seen.values()),
    }


def spans(commit: Commit) -> dict[str, tuple[float, float]]:
    """When the first task of each stage began and the last ended, in seconds since the epoch."""
    starts, ends = defaultdict(list), defaultdict(list)
    for attempt in commit.attempts:
        stage, start, seconds = (attempt[name] for name in ("stage", "started", "seconds"))
        assert isinstance(start, int | float) and isinstance(seconds, int | float)
        starts[str(stage)].append(float(start))
        ends[str(stage)].append(float(start + seconds))
    return {stage: (min(starts[stage]), max(ends[stage])) for stage in starts}


def committed(store: Store, step: int) -> Commit | None:
    """The commit of a step of the store's only run; None: there is none yet."""
    for name in store.children():
        with contextlib.suppress(ObjectMissing):
            return read_commit(RunStore(store, name), step)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it, and tell each step. Exit code 1 unless all steps were committed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_flow", description=__doc__)
    parser.add_argument("--shape", choices=["0.5b", "1.5b", "7b"], default="1.5b")
    parser.add_argument(
        "--small", action="store_true", help="a shape that suits a CPU, without GPU"
    )
    parser.add_argument("--folder", type=Path, required=True, help="keeps the model, store and log")
    parser.add_argument("--json", type=Path, help="file to which each line is added")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=88.0, help="after which it is ended")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="have torch's profiler say for how much of the time after step 1 a kernel ran",
    )
    parser.add_argument("--set", nargs="*", default=[], help="further settings, as KEY=VALUE")
    options = parser.parse_args(arguments)
    begin, folder = time.time(), options.folder.absolute()
    until = begin + options.seconds
    shape = "small" if options.small else options.shape

    def tell(**found: Any) -> None:
        print(json.dumps(found), flush=True)
        if options.json is not None:
            with options.json.open("a") as out:
                out.write(json.dumps(found) + "\n")

    own = folder / "flow"
    if own.exists():
        parser.error(f"{own} is there, from an earlier run. Remove it, or give another --folder.")
    own.mkdir(parents=True)
    device = None if options.small else Device.first()
    if device is not None and device.taken() > 2**30:
        tell(measurement="flow", failed=f"{device.taken() / 2**30:.1f} GiB of the GPU are taken")
        return 1
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment = {**os.environ, **path, "VLLM_CACHE_ROOT": str(folder / "vllm")}
    if not (folder / "models" / shape / "drawn").exists():
        words = [sys.executable, "-c", DRAW, shape, str(folder)]
        subprocess.run(words, cwd=ROOT, env=environment, check=True, timeout=options.seconds)
        tell(measurement="flow_model", seconds=round(time.time() - begin, 1))
    trace = Trace(own / "trace") if options.trace else None
    if trace is not None:
        environment = trace.environment(environment)
    recipe = own / "gpu-flow.yaml"
    recipe.write_text(yaml.safe_dump(settings(shape, folder, options.steps)))
    command = [sys.executable, "-m", "flows.grpo", str(recipe), *options.set]
    began = time.time()
    watch = None if device is None else Watch(device)
    with (own / "log").open("wb") as log:
        flow = subprocess.Popen(
            command, cwd=own, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    store, step, before, first = Store(f"file://{own}/store"), 1, began, 0.0
    code: int | str | None = None
    try:
        while code is None:
            ended = flow.poll()  # before the look at the store, so that its last commit is seen
            while step <= options.steps and (commit := committed(store, step)) is not None:
                if step == 1:
                    seconds = commit.metrics.get("time/step") or 0.0
                    first = commit.committed_at - seconds
                    tell(measurement="flow_start", seconds=round(first - began, 2))
                    before = first
                tell(shape=shape, **told(commit, before, watch))
                before, step = commit.committed_at, step + 1
                if trace is not None and step == 2:
                    trace.start()
            code = ended if step <= options.steps else 0
            if code is None and time.time() > until:
                code = "no time left"
            time.sleep(LOOK)
        if trace is not None:
            tell(measurement="flow_trace", **traced(trace.stop(), before))
    finally:
        below = descendants(flow.pid)
        if flow.poll() is None:
            flow.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                flow.wait(GRACE)
        kill_all([*(one for one in below if one.is_running()), *session(flow.pid)])
        flow.wait()
        if watch is not None:
            watch.close()
    done = step > options.steps
    found: dict[str, Any] = {"seconds": round(time.time() - begin, 1), "steps": step - 1}
    if watch is not None:
        share = watch.share(first, before)
        found["nvml_share"] = None if share is None else round(share, 4)
        found["device_gib_at_most"] = round(watch.most_taken / 2**30, 2)
    if not done:
        said = (own / "log").read_text(errors="replace").strip()
        found["failed"] = f"{code}: {said[-600:]}"
    tell(measurement="flow", **found)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
