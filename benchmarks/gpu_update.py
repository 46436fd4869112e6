"""An update on one GPU, as it was and as it is: tokens a second, MFU, kernels by group, busy share.

    python -m benchmarks.gpu_update [--parts ceilings 1.5b 0.5b 7b long trace] [--json FILE]
    python -m benchmarks.gpu_update --small        the same in small, on a CPU too

A line of JSON after each measurement, so that a run that is cut off loses one. Models have the
shapes of Qwen2.5 and weights drawn on the device. Of each variant one update warms up, and the median
of the next ones counts. It refuses a device of which others hold more than 1 GiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_job import CUDA, DEVICE, HEAD_SIZES, SHAPES, TIED, Job, free, plan
from benchmarks.gpu_job import rows as drawn_rows
from configs.model import PretrainedModel, RandomModel
from configs.train import TrainConfig
from engines.models.checkpoints import load_tokenizer, materialize
from engines.models.tensor_files import CheckpointNames, distinct_weights
from engines.train import fsdp_engine, kernels
from engines.train.activations import checkpoint_layers
from engines.train.batching.mfu import peak_flops
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.fsdp import own_part
from engines.train.model.loading import Checkpoint, _compute_buffers
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

GIB = 2**30
# samples, prompt and response tokens of an update
SIZES = {"small": (8, 12, 24), "0.5b": (128, 256, 1024), "1.5b": (64, 256, 1024)}
SIZES |= {"7b": (64, 256, 1024), "0.6b": (1, 1024, 64512)}


@dataclass(kw_only=True)
class Report:
    """Lines of what was measured."""

    file: Path | None
    until: float  # after which nothing is begun

    def line(self, name: str, **facts: Any) -> None:
        text = json.dumps({"part": name, **facts})
        print(text, flush=True)
        if self.file is not None:
            with self.file.open("a") as out:
                out.write(text + "\n")

    def part(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Measure one thing; one that fails says so and takes no other with it."""
        began = time.perf_counter()
        if time.monotonic() > self.until:
            self.line(name, skipped="no time left")
            return
        try:
            facts = work()
        except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError) as error:
            facts = {"failed": f"{type(error).__name__}: {error}"[:1500]}
        gc.collect()
        free()
        self.line(name, **facts, took=round(time.perf_counter() - began, 2))


def hollow(shape: str, folder: Path) -> PretrainedModel:
    """A model folder without weights, whose engine draws them on its device."""
    from transformers import Qwen2Config, Qwen3Config

    place = folder / "hollow" / shape
    characters = load_tokenizer(
        materialize(RandomModel(layers=1, hidden_size=32), folder / "cache")
    )
    layers, width, heads, keys, inner, words = SHAPES[shape]
    long = shape in HEAD_SIZES
    facts: dict[str, Any] = {"head_dim": HEAD_SIZES[shape]} if long else {}
    facts |= {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": shape in TIED,
        "bos_token_id": characters.bos_token_id,
        "eos_token_id": characters.eos_token_id,
        "pad_token_id": characters.pad_token_id,
        "dtype": "bfloat16",
        "architectures": ["Qwen3ForCausalLM" if long else "Qwen2ForCausalLM"],
    }
    config = Qwen3Config(**facts) if long else Qwen2Config(**facts)
    config.save_pretrained(place)
    characters.save_pretrained(place)
    (place / "model.safetensors").touch()  # what an engine asks for before it draws
    return PretrainedModel(path=str(place))


@contextmanager
def weights_drawn() -> Iterator[None]:
    """Engines that are made in the body draw their weights in place of reading files."""

    def opened(directory: Path) -> Checkpoint:
        return Checkpoint(
            directory=directory, decoder="model.", tensors={}, names=CheckpointNames()
        )

    def drawn(model: Any, prefix: str, checkpoint: Any, group: Any, masters: Any) -> None:
        _compute_buffers(model)
        torch.manual_seed(0)
        for names, target in distinct_weights(model):
            own, _ = own_part(masters.of(target))
            if not own.is_floating_point():
                continue
            if own.dim() == 1:
                own.fill_(1.0 if "norm" in names[0] else 0.0)
            else:
                own.copy_(torch.empty(own.shape, device=DEVICE).normal_(0.0, 0.02))

    with (
        mock.patch.object(fsdp_engine, "open_checkpoint", opened),
        mock.patch.object(fsdp_engine, "load", drawn),
    ):
        yield


@dataclass(kw_only=True)
class Bench:
    """Engines and batches of one shape."""

    shape: str
    folder: Path
    device_gib: float | None = None
    samples: int | None = None

    def job(self) -> Job:
        samples, prompt, response = SIZES[self.shape]
        return Job(
            shape=self.shape,
            folder=self.folder,
            samples=self.samples or samples,
            prompt=prompt,
            response=response,
            device_gib=self.device_gib,
        )

    @contextmanager
    def engine(self, lone: bool, **train: Any) -> Iterator[FSDPEngine]:
        """One that has joined, with or without FSDP."""
        usual = {
            "compute_dtype": "bfloat16" if CUDA else "float32",
            "learning_rate": 1e-6,
            "micro_batch_tokens": 32768 if CUDA else 2048,
        }
        job = self.job()
        config = TrainConfig(**{**usual, **train})
        with (
            weights_drawn(),
            mock.patch.object(Job, "model", lambda job: hollow(job.shape, job.folder)),
            mock.patch("benchmarks.gpu_job.settings_for", return_value=config),
            mock.patch.object(fsdp_engine, "LONE", lone),
        ):
            engine = job.train_engine()
        try:
            yield engine
        finally:
            engine.close()
            free()

    def batch(self) -> BatchRef:
        """The rows of an update."""
        job = self.job()
        key = f"rows-{job.shape}-{job.samples}.safetensors"
        return write_batch(Store(job.store), key, drawn_rows(job))

    def update(self, engine: FSDPEngine, times: int = 3) -> dict[str, Any]:
        """Medians of some updates after one that warms up."""
        job = self.job()
        batch = self.batch()
        rows = []
        for number in range(times + 1):
            if number == 1 and CUDA:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            metrics = engine.update(job.request(number + 1, batch)).metrics
            if not number:
                first = time.perf_counter() - began
            else:
                rows.append(metrics)
        wanted = (
            "tokens_per_second",
            "mfu",
            "seconds",
            "forward_seconds",
            "backward_seconds",
            "optimizer_seconds",
            "read_seconds",
            "plan_seconds",
            "tokens",
            "grad_norm",
            "loss",
        )
        found = {
            name: statistics.median(row[f"train/{name}"] for row in rows)
            for name in wanted
            if f"train/{name}" in rows[0]
        }
        found = {name: float(f"{value:.5g}") for name, value in found.items()}
        found["first_seconds"] = round(first, 2)
        if CUDA:
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
            found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
        config = engine._spec.train
        found["plan_gib"] = round(plan(job, config).peak / GIB, 2)
        return found


def ceilings() -> dict[str, Any]:
    """What this card does at most: products, copies on it, copies over the bus."""
    if not CUDA:
        return {"device": "CPU"}
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "peak": peak_flops(torch.cuda.get_device_name(0)),
    }

    def rate(work: Callable[[], Any], amount: float, times: int = 10) -> float:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        return float(f"{amount * times / (begin.elapsed_time(end) / 1e3):.4g}")

    def product(m: int, k: int, n: int) -> float:
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        return rate(lambda: a @ b.t(), 2.0 * m * k * n)

    facts["product_8192"] = product(8192, 8192, 8192)
    for shape in ("0.5b", "1.5b", "7b"):
        _, width, _, _, inner, _ = SHAPES[shape]
        facts[f"product_up_{shape}"] = product(25600, width, inner)
        facts[f"product_out_{shape}"] = product(25600, width, width)
    x = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    facts["copy_bytes_per_second"] = rate(lambda: y.copy_(x), 2.0 * GIB)
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    facts["to_host_bytes_per_second"] = rate(lambda: host.copy_(x, non_blocking=True), GIB, 4)
    facts["from_host_bytes_per_second"] = rate(lambda: x.copy_(host, non_blocking=True), GIB, 4)
    return facts


def variants(bench: Bench, report: Report, times: int = 3) -> None:
    """As it was, and each change on top of those before it."""
    name = bench.shape
    with bench.engine(lone=False, kernels=False) as engine:
        report.part(f"{name} as it was", partial(bench.update, engine, times))
        kernels.use(True)
        report.part(f"{name} + head kernels", partial(bench.update, engine, times))
    with bench.engine(lone=False) as engine:
        report.part(f"{name} + layer kernels", partial(bench.update, engine, times))
    with bench.engine(lone=True) as engine:
        report.part(f"{name} + no FSDP", partial(bench.update, engine, times))
        train = engine._spec.train.model_copy(update={"logit_chunk_tokens": 8192})
        engine._spec = engine._spec.model_copy(update={"train": train})
        report.part(f"{name} + logits kept", partial(bench.update, engine, times))
        report.part(f"{name} trace", partial(traced, bench, engine))


GROUPS = {
    "products": ("gemm", "cutlass", "nvjet", "cublas", "splitk", "mm_"),
    "attention": ("flash", "attn", "fmha"),
    "head kernels": ("_accumulate", "_slopes"),
    "layer kernels": ("_norm_", "_gated_", "_rotate"),
    "optimizer": ("adam", "multi_tensor"),
    "gather and scatter": ("index", "gather", "scatter", "embedding"),
    "reductions": ("reduce", "norm_kernel"),
    "copies": ("memcpy", "copy", "memset", "cat", "fill"),
    "element-wise": ("elementwise", "vectorized", "foreach"),
}


def traced(bench: Bench, engine: FSDPEngine) -> dict[str, Any]:
    """One update under torch.profiler: seconds of kernels by group, and the device's busy share."""
    from torch.profiler import ProfilerActivity, profile

    if not CUDA:
        return {"skipped": "no GPU"}
    job, batch = bench.job(), bench.batch()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        engine.update(job.request(99, batch))
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    spans: list[tuple[int, int]] = []
    groups: dict[str, float] = {}
    single: dict[str, float] = {}
    for event in profiler.profiler.kineto_results.events():
        if "CUDA" not in str(event.device_type()):
            continue
        begin, length = event.start_ns(), event.duration_ns()
        spans.append((begin, begin + length))
        low = event.name().lower()
        group = next((n for n, keys in GROUPS.items() if any(k in low for k in keys)), "other")
        groups[group] = groups.get(group, 0.0) + length / 1e9
        single[event.name()[:90]] = single.get(event.name()[:90], 0.0) + length / 1e9
    busy, end = 0, 0
    for begin, stop in sorted(spans):
        busy += max(0, stop - max(begin, end))
        end = max(end, stop)
    top = sorted(single.items(), key=lambda item: -item[1])[:25]
    return {
        "wall_seconds": round(wall, 4),
        "busy_share": round(busy / 1e9 / wall, 4),
        "groups": {n: round(s, 4) for n, s in sorted(groups.items(), key=lambda i: -i[1])},
        "top": {n: round(s, 4) for n, s in top},
    }


def compiled(bench: Bench, report: Report) -> None:
    """The layers as one graph each, by Inductor."""

    def work() -> dict[str, Any]:
        with bench.engine(lone=True, compile=True) as engine:
            return bench.update(engine)

    report.part(f"{bench.shape} compiled, no FSDP", work)


def deterministic(bench: Bench, report: Report) -> None:
    """An update again from one state with a fixed order of sums: equal bits, and what it costs."""

    def work() -> dict[str, Any]:
        digests = []
        for _ in range(2):
            with bench.engine(lone=True, deterministic=True) as engine:
                found = bench.update(engine, times=2)
                digests.append(engine.digest())
        return {**found, "equal_to_the_bit": digests[0] == digests[1]}

    report.part(f"{bench.shape} deterministic", work)


def host_optimizer(bench: Bench, report: Report) -> None:
    """7 B full fine-tuning within 80 GB; one engine, whose state on the host takes long to make."""
    usual: dict[str, Any] = (
        {"weights_dtype": "bfloat16", "optimizer_device": "host"} if CUDA else {}
    )
    began = time.perf_counter()
    with bench.engine(lone=True, gradient_checkpointing=1.0, **usual) as engine:
        where = f"{bench.shape} in {bench.device_gib} GiB"
        report.line(f"{where}, made", took=round(time.perf_counter() - began, 2))
        for name, recompute, tokens, samples, times in (
            ("all recomputed, micro-batches of 16,384", "all", 16384, 64, 2),
            ("selective, 8,192", "selective", 8192, 64, 2),
            ("selective, 8,192, 128,000 tokens", "selective", 8192, 160, 1),
        ):
            change = {"recompute": recompute, "micro_batch_tokens": tokens}
            train = TrainConfig(**{**engine._spec.train.model_dump(), **change})
            engine._spec = engine._spec.model_copy(update={"train": train})
            checkpoint_layers(engine._loaded().model, 1.0, train.recompute)
            more = replace(bench, samples=samples if CUDA else None)
            work = partial(more.update, engine, times)
            report.part(f"{where}, {name}", work)


def on_device(bench: Bench, report: Report) -> None:
    """7 B with its optimizer on the device, for a card of 140 GB: by the bytes of its state."""
    usual: dict[str, Any] = {"gradient_checkpointing": 1.0, "recompute": "selective"}
    usual |= {"micro_batch_tokens": 8192}
    usual |= {"logit_chunk_tokens": 2048}  # all logits of a micro-batch at once
    # Of a parameter's master and moments 8, 6, 4 bytes.
    states: tuple[tuple[str, dict[str, Any]], ...] = (
        ("bfloat16 moments", {"optimizer_dtype": "bfloat16"}),
        ("and a remainder", {"optimizer_dtype": "bfloat16", "master_weights": "remainder"}),
        (
            "8-bit moments and a remainder",
            {"optimizer_dtype": "8bit", "master_weights": "remainder"},
        ),
    )
    for state, settings in states:
        if "master_weights" in settings:
            settings |= {"weights_dtype": "bfloat16", "compute_dtype": "bfloat16"}
        with bench.engine(lone=True, **usual, **settings) as engine:
            for samples, times in ((64, 2), (160, 1)):
                more = replace(bench, samples=samples if CUDA else None)
                where = f"{bench.shape} on the device, {state}, {samples} samples"
                report.part(where, partial(more.update, engine, times))
            report.part(f"{bench.shape} trace, {state}", partial(traced, bench, engine))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_update", description=__doc__)
    known: tuple[str, ...] = (
        "ceilings",
        "1.5b",
        "0.5b",
        "best",
        "7b",
        "7b-device",
        "deterministic",
        "long",
        "compiled",
    )
    parser.add_argument("--parts", nargs="+", choices=known, default=known)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--device-gib", type=float, default=79.2)
    options = parser.parse_args(arguments)
    if CUDA:
        left, total = torch.cuda.mem_get_info()
        if total - left > GIB + 2**29:
            print(f"Others hold {(total - left) / GIB:.1f} GiB of this device.", file=sys.stderr)
            return 2
    report = Report(file=options.json, until=time.monotonic() + options.seconds)
    with tempfile.TemporaryDirectory(prefix="gpu-update-") as name:
        folder = Path(name)
        small = options.small

        def bench(shape: str, **facts: Any) -> Bench:
            return Bench(shape="small" if small else shape, folder=folder, **facts)

        def long(changed: dict[str, Any]) -> dict[str, Any]:
            one = bench("0.6b")
            with one.engine(lone=True, **changed) as engine:
                return one.update(engine, 2)

        def measure(part: str) -> None:
            if part == "ceilings":
                report.part("ceilings", ceilings)
            elif part in ("0.5b", "1.5b"):
                variants(bench(part), report)
            elif part == "compiled" and CUDA:
                compiled(bench("1.5b"), report)
            elif part == "deterministic":
                deterministic(bench("0.5b"), report)
            elif part == "7b":
                host_optimizer(bench("7b", device_gib=options.device_gib), report)
            elif part == "best":
                for shape in ("0.5b", "1.5b"):
                    one = bench(shape)
                    with one.engine(lone=True, logit_chunk_tokens=8192) as engine:
                        work = partial(one.update, engine)
                        report.part(f"{shape} with all of it, logits kept", work)
                        report.part(f"{shape} trace, logits kept", partial(traced, one, engine))
            elif part == "7b-device":
                on_device(bench("7b"), report)
            elif part == "long":
                for setting in ({}, {"logit_chunk_tokens": 16384}):
                    changed: dict[str, Any] = {"micro_batch_tokens": 65536, **setting}

                    report.part(f"65,536 tokens in a sequence {setting}", partial(long, changed))

        for part in options.parts:
            try:
                measure(part)
            except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError) as error:
                report.line(part, failed=f"{type(error).__name__}: {error}"[:1500])
                gc.collect()
                free()
    return 0


if __name__ == "__main__":
    sys.exit(main())
