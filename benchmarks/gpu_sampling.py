"""Sampling on one device by our engine, beside vLLM's own `LLM` with the same settings.

    python -m benchmarks.gpu_sampling --shape 1.5b --folder DIR --json FILE [--seconds 110]
    python -m benchmarks.gpu_sampling --shape small --folder DIR     runs in small, on a CPU too

Both draw the same numbers of the same prompts of 256 random tokens, 512 tokens each, at
temperature 1 and past the end of sequence, by a random model of the shape; each with compiled
graphs, the same sizes of them, the same step's tokens and one compile cache. First
`LLM.generate`: 256 and 512 requests with log-probs as our engine asks for them, and 256 without.
Then our engine: 256 and 512 requests as one shard, and 256 as eight shards. Each measurement has
prompts of its own, so that none finds another's in the prefix cache, and comes after a warm-up.

A line of JSON after each, which FILE gets too. The two sides are processes one after the other, and
one that fails leaves the other's lines. The model's weights, which our engine loads from a store as
in a run, are drawn and published first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from engines.processes.process_tree import descendants, kill_all, session

SIDES = ("weights", "llm", "ours")
# fewer and more rows, prompt and response tokens
SIZES = {
    "small": (8, 16, 12, 24),
    "0.5b": (256, 512, 256, 512),
    "1.5b": (256, 512, 256, 512),
    "7b": (256, 512, 256, 512),
}
GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]  # sequences of a decoding step with a graph
SHARE = 0.8  # of the device that vLLM may take
SHARDS = 8
TAKEN = 1.0  # GiB of a device on which nothing else runs, at most
FREED = 10.0  # seconds in which what a side held is free again
LOOK = 0.1  # seconds between looks at what a side has found
SAMPLING: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}


class Lines:
    """A file of JSON lines."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, **found: Any) -> None:
        """Put one more at its end."""
        with self.file.open("a") as out:
            out.write(json.dumps(found) + "\n")

    def measure(
        self, what: str, rows: int, tokens: int, work: Callable[[], int], **facts: Any
    ) -> None:
        """Add what some work took; it returns how many tokens it drew, to be `tokens`."""
        began = time.perf_counter()
        try:
            count = work()
        except (RuntimeError, ValueError) as error:  # the next measurement may succeed
            self.add(measurement=what, rows=rows, **facts, failed=repr(error)[:400])
            return
        seconds = time.perf_counter() - began
        found = {"seconds": round(seconds, 3), "tokens_per_second": round(count / seconds, 1)}
        wrong = {} if count == tokens else {"failed": f"{count} tokens, not {tokens}"}
        self.add(measurement=what, rows=rows, **facts, tokens=count, **found, **wrong)


def prompts_of(shape: str, rows: int, number: int) -> list[list[int]]:
    """Random prompts of a measurement; those of another number begin otherwise."""
    from benchmarks.gpu_job import SHAPES

    random = np.random.default_rng(number)
    made = random.integers(10, SHAPES[shape][-1], (rows, SIZES[shape][2]))
    return [row.tolist() for row in made]


def spec_of(shape: str, folder: Path) -> Any:
    """What both sides' engines are made by."""
    from benchmarks.gpu_job import CUDA
    from configs.model import PretrainedModel
    from configs.rollout import RolloutConfig
    from engines.rollout.contract import RolloutSpec

    _, most, prompt, response = SIZES[shape]
    graphs: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": GRAPHS}}
    return RolloutSpec(
        model=PretrainedModel(path=str(folder / "models" / shape)),
        model_cache=str(folder / "cache"),
        rollout=RolloutConfig(
            engine="vllm",
            dtype="bfloat16" if CUDA else "float32",
            max_sequences=most,
            kv_cache_gib=0.1,
            gpu_memory_utilization=SHARE,
            enforce_eager=not CUDA,
            engine_args=graphs if CUDA else {},
        ),
        store_uri=f"file://{folder}/store",
        max_model_len=prompt + response,
    )


def weights(shape: str, folder: Path, lines: Lines) -> None:
    """Draw the model on the device and publish it as a policy version, for `ours`."""
    import torch

    from benchmarks.gpu_job import CUDA, drawn
    from engines.models import checkpoints
    from storage.objects.store import Store
    from storage.runs.weights_writing import publish

    began = time.perf_counter()
    place = drawn(shape, folder)
    seconds = time.perf_counter() - began
    dtype = torch.bfloat16 if CUDA else torch.float32
    state = checkpoints.load_for_training(place, "bfloat16" if CUDA else "float32").state_dict()
    began = time.perf_counter()
    store = Store(f"file://{folder}/store")
    files = checkpoints.companion_files(place)
    ref = publish(store, "sampling", 0, state.items(), files, dtype)
    made = folder / "weights.json"
    made.with_suffix(".part").write_text(ref.model_dump_json())
    made.with_suffix(".part").replace(made)
    lines.add(
        measurement="weights",
        draw_seconds=round(seconds, 3),
        publish_seconds=round(time.perf_counter() - began, 3),
        gbytes=round(ref.nbytes / 1e9, 3),
    )


def llm(shape: str, folder: Path, lines: Lines) -> None:
    """vLLM's own LLM, with the arguments of our engine."""
    from benchmarks.gpu_job import CUDA, described
    from engines.rollout.contract import Sampling, worker_environment
    from engines.rollout.samples import NOTHING
    from engines.rollout.vllm_engine import NOT_COMPILED

    spec = spec_of(shape, folder)
    os.environ.update(worker_environment(spec.rollout))
    if CUDA:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as vLLM has it
    if spec.rollout.enforce_eager:
        os.environ.update(NOT_COMPILED)
    directory = described(shape, folder)
    from dataclasses import fields

    from vllm import LLM, EngineArgs

    from engines.rollout import vllm_arguments

    began = time.perf_counter()
    arguments = vllm_arguments.engine_arguments(spec, directory)
    own = ["ir_op_priority"]  # on a CPU, where it names a kernel of ours
    names = [one.name for one in fields(EngineArgs) if one.name not in own]
    model = LLM(**{name: getattr(arguments, name) for name in names})
    lines.add(measurement="llm_start", seconds=round(time.perf_counter() - began, 3))
    fewer, more, _, response = SIZES[shape]

    def drawing(rows: int, number: int, most: int, logprobs: bool) -> Callable[[], int]:
        params = vllm_arguments.sampling_params(
            Sampling(n=1, max_new_tokens=most, **SAMPLING), [], None, NOTHING
        )
        if not logprobs:
            params.logprobs, params.flat_logprobs = None, False
        prompts: Any = [{"prompt_token_ids": one} for one in prompts_of(shape, rows, number)]

        def draw() -> int:
            outputs = model.generate(prompts, params, use_tqdm=False)
            return sum(len(one.outputs[0].token_ids) for one in outputs)

        return draw

    for number, (rows, logprobs) in enumerate(((fewer, True), (more, True), (fewer, False))):
        drawing(rows, 100 + number, response // 16, logprobs)()  # warms up
        work, asked = drawing(rows, number, response, logprobs), 0 if logprobs else None
        lines.measure("llm", rows, rows * response, work, logprobs=asked)


def ours(shape: str, folder: Path, lines: Lines) -> None:
    """Our engine: requests as one shard, and as several at once."""
    from engines.rollout.contract import RolloutRequest, Sampling
    from engines.rollout.vllm_engine import VllmEngine
    from storage.batches.writing import write_batch
    from storage.objects.store import Store
    from storage.runs.weights import WeightsRef

    spec = spec_of(shape, folder)
    ref = WeightsRef.model_validate_json((folder / "weights.json").read_text())
    began = time.perf_counter()
    engine = VllmEngine(spec)
    lines.add(measurement="ours_start", seconds=round(time.perf_counter() - began, 3))
    began = time.perf_counter()
    report = engine.sync(ref)
    seconds = round(time.perf_counter() - began, 3)
    held = {} if report.digest == ref.digest else {"failed": f"it holds {report.digest}"}
    lines.add(measurement="ours_sync", seconds=seconds, **held)
    fewer, more, _, response = SIZES[shape]
    store = Store(spec.store_uri)

    def drawing(rows: int, number: int, most: int, shards: int) -> Callable[[], int]:
        columns = {
            "prompt_ids": [np.array(one) for one in prompts_of(shape, rows, number)],
            "group_id": np.arange(rows),
            "prompt_row": np.arange(rows),
        }
        batch = write_batch(store, f"prompts-{number}-{shards}-{most}.safetensors", columns)
        requests = [
            RolloutRequest(
                prompts=batch.take(part.tolist()),
                sampling=Sampling(n=1, max_new_tokens=most, **SAMPLING),
                out_key=f"samples-{number}-{shards}-{most}-{shard}.safetensors",
                step=1,
                shard=shard,
            )
            for shard, part in enumerate(np.array_split(np.arange(rows), shards))
        ]

        def draw() -> int:
            with ThreadPoolExecutor(shards) as threads:
                results = list(threads.map(engine.generate, requests))
            return sum(result.stats.tokens for result in results)

        return draw

    for number, (rows, shards) in enumerate(((fewer, 1), (more, 1), (fewer, SHARDS))):
        drawing(rows, 100 + number, response // 16, shards)()  # warms up
        work = drawing(rows, number, response, shards)
        lines.measure("ours", rows, rows * response, work, shards=shards, logprobs=0)
    engine.close()


def taken_gib() -> float | None:
    """GiB of the first GPU that somebody holds; None without one."""
    from benchmarks.gpu_busy import Device

    device = Device.first()
    return None if device is None else device.taken() / 2**30


class Benchmark:
    """The sides' processes, and what they have said."""

    def __init__(self, shape: str, folder: Path, until: float, out: Path | None) -> None:
        """`until`: by time.monotonic, when every side has ended."""
        self.shape, self.folder, self.out, self._until = shape, folder, out, until
        self._sides: dict[str, subprocess.Popen[bytes]] = {}
        self._read: dict[str, int] = {}  # bytes of a side's lines that have been told
        self._rates: dict[tuple[str, int], float] = {}

    def tell(self, **found: Any) -> None:
        """Print a line, and add it to the file."""
        print(json.dumps(found), flush=True)
        if self.out is not None:
            Lines(self.out).add(**found)

    def begin(self, side: str) -> None:
        """Start a side."""
        words = [sys.executable, "-m", "benchmarks.gpu_sampling", "--side", side]
        words += ["--shape", self.shape, "--folder", str(self.folder)]
        environment = {**os.environ, "VLLM_CACHE_ROOT": str(self.folder / "vllm")}
        with (self.folder / f"{side}.log").open("wb") as log:
            self._sides[side] = subprocess.Popen(
                words, stdout=log, stderr=log, start_new_session=True, env=environment
            )

    def end(self, side: str) -> None:
        """Wait for a side's end, tell what it finds meanwhile, and kill it where it has no time."""
        process = self._sides[side]
        code: int | str | None = None
        while code is None:
            for each in self._sides:
                self._follow(each)
            code = process.poll()
            if code is None and time.monotonic() > self._until:
                code = "no time left"
            time.sleep(LOOK)
        self.kill(side)
        self._follow(side)
        if code != 0:
            log = (self.folder / f"{side}.log").read_text(errors="replace").strip()
            self.tell(measurement=side, failed=f"{code}: {log[-600:]}")

    def kill(self, side: str) -> None:
        """End a side with all that it started."""
        process = self._sides[side]
        below = [] if process.poll() is not None else descendants(process.pid)
        kill_all([*below, *session(process.pid)])
        process.wait()
        until = time.monotonic() + FREED
        while (taken_gib() or 0.0) > TAKEN and time.monotonic() < until:
            time.sleep(LOOK)

    def close(self) -> None:
        """End every side."""
        for side in self._sides:
            self.kill(side)

    def _follow(self, side: str) -> None:
        file = self.folder / f"{side}.jsonl"
        if not file.exists():
            return
        with file.open("rb") as lines:
            lines.seek(self._read.get(side, 0))
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                self._read[side] = self._read.get(side, 0) + len(line)
                self._told(json.loads(line))

    def _told(self, found: dict[str, Any]) -> None:
        self.tell(shape=self.shape, **found)
        rate, rows, what = (found.get(n) for n in ("tokens_per_second", "rows", "measurement"))
        if rate is None or rows is None or "failed" in found:
            return
        beside = self._rates.get(("llm", rows))
        if what == "llm" and found["logprobs"] == 0:
            self._rates["llm", rows] = rate
        elif beside is not None and what == "ours":
            shards = found["shards"]
            ratio = round(rate / beside, 4)
            self.tell(measurement="ours_to_llm", rows=rows, shards=shards, ratio=ratio)
        elif beside is not None and what == "llm":
            ratio = round(beside / rate, 4)
            self.tell(measurement="logprobs_to_none", rows=rows, ratio=ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sides one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_sampling", description=__doc__)
    parser.add_argument("--shape", choices=[*SIZES], default="1.5b")
    parser.add_argument("--folder", type=Path, required=True, help="keeps models, caches and logs")
    parser.add_argument("--json", type=Path, help="file to which each line is added")
    parser.add_argument("--seconds", type=float, default=110.0, help="after which all is ended")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    if options.side:
        work = {"weights": weights, "llm": llm, "ours": ours}[options.side]
        work(options.shape, folder, Lines(folder / f"{options.side}.jsonl"))
        os._exit(0)  # what it started is ended from outside, which takes less time
    folder.mkdir(parents=True, exist_ok=True)
    for side in SIDES:
        (folder / f"{side}.jsonl").unlink(missing_ok=True)
    (folder / "weights.json").unlink(missing_ok=True)
    benchmark = Benchmark(options.shape, folder, time.monotonic() + options.seconds, options.json)
    taken = taken_gib()
    if taken is not None and taken > TAKEN:
        benchmark.tell(measurement="sampling", failed=f"{taken:.1f} GiB of the GPU are taken")
        return 1
    began = time.monotonic()
    try:
        for side in SIDES:
            benchmark.begin(side)
            benchmark.end(side)
    finally:
        benchmark.close()
    benchmark.tell(measurement="sampling", seconds=round(time.monotonic() - began, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
