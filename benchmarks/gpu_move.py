"""How fast bytes move between a GPU and the host: AdamW's state, and policy versions.

    python -m benchmarks.gpu_move --shape 7b --json FILE   # about a minute on an H200
    python -m benchmarks.gpu_move --shape small            # shows that it runs, on a CPU too

A line of JSON after each measurement, also in FILE. Parameters have a shape's sizes and random
values, drawn on the device; there is no model. Beside the new way is the one before it, up to 1.5b:
moments that are not pinned, tensor after tensor; versions by one thread. Both must leave the same
bits. Of a first shape's optimizer at most 0.8 billion elements are taken, of the second one so many
as are pinned in 15 s.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from benchmarks.gpu_job import CUDA, DEVICE, SHAPES, TIED
from configs.train import TrainConfig
from engines.rollout.weight_reader import LoadedWeights
from engines.train import publication
from engines.train.model.master_weights import MasterWeights
from engines.train.optimizer import MOMENTS, make_adamw
from engines.train.publication import Publication, publish_together
from engines.workers import device_memory
from engines.workers.device_memory import fill
from storage.objects.node_cache import SyncBehind
from storage.objects.store import Store
from storage.runs import weights

BEFORE = ("small", "0.5b", "1.5b")  # shapes that are measured the way before too
STEPS = 3  # that are timed; the median counts
PINNING = 15.0  # seconds at most, by the rate seen before
FIRST = 8e8  # elements at most, where none was seen


class Lone:
    """A group of one rank, which exchanges nothing."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument(
        "--shape",
        choices=[one for one in SHAPES if one != "0.6b"],
        required=True,
        help="7b: 1.5b before it",
    )
    words.add_argument("--json", type=Path, help="where the lines go too")
    words.add_argument("--folder", type=Path, help="of the versions; else a temporary one")
    words.add_argument("--seconds", type=float, default=60.0, help="after which nothing is begun")
    words.add_argument("--versions", action="store_true", help="leave the optimizer out")
    options = words.parse_args()
    began = time.monotonic()

    def say(**line: Any) -> None:
        text = json.dumps({**line, "at": round(time.monotonic() - began, 1)})
        print(text, flush=True)
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(text + "\n")

    failed = False
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        say(device=torch.cuda.get_device_name() if CUDA else "cpu", torch=torch.__version__)
        rate = 0.0
        for shape in ("1.5b", "7b") if options.shape == "7b" else (options.shape,):
            place = Path(folder) / shape
            parameters = drawn(shape)
            gigabytes = 2 * sum(one.numel() for one in parameters.values()) / 1e9
            parts: list[Callable[[], Iterator[dict[str, Any]]]] = [
                partial(optimizer, shape, parameters, rate),
                partial(versions, shape, parameters, place),
                partial(disk, Path(folder), gigabytes=min(1.0, gigabytes)),
            ]
            for part in parts[1 if options.versions else 0 : 2 if shape == "7b" else 3]:
                if time.monotonic() - began > options.seconds:
                    say(shape=shape, left_out="the time is over")
                    continue
                try:
                    for line in part():
                        say(shape=shape, **line)
                        rate = line.get("pinned_gb_per_second", rate)
                except Exception as error:  # told, so that the others are seen
                    failed = True
                    say(shape=shape, failed=f"{type(error).__name__}: {error}")
                gc.collect()
            parameters, parts = {}, []
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
    sys.exit(failed)


def drawn(shape: str) -> dict[str, nn.Parameter]:
    """Float32 parameters of a shape, in a checkpoint's order."""
    layers, width, heads, keys, inner, words = SHAPES[shape]
    narrow = width // heads * keys
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, width)}
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.q_proj.bias": (width,),
        "self_attn.k_proj.weight": (narrow, width),
        "self_attn.k_proj.bias": (narrow,),
        "self_attn.v_proj.weight": (narrow, width),
        "self_attn.v_proj.bias": (narrow,),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    for number in range(layers):
        sizes |= {f"model.layers.{number}.{name}": size for name, size in layer.items()}
    sizes["model.norm.weight"] = (width,)
    if shape not in TIED:
        sizes["lm_head.weight"] = (words, width)
    torch.manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(size, device=DEVICE).mul_(0.02))
        for name, size in sizes.items()
    }


# --- the optimizer ----------------------------------------------------------------------------------


def optimizer(
    shape: str, parameters: dict[str, nn.Parameter], rate: float
) -> Iterator[dict[str, Any]]:
    """Seconds to pin the moments and of a step; the same as before it, and whether bits are equal."""
    config = TrainConfig(optimizer_device="host", learning_rate=1e-4)
    most = PINNING * rate * 1e9 / 8 if rate else FIRST  # elements
    taken: list[nn.Parameter] = []
    for one in parameters.values():
        if sum(each.numel() for each in taken) + one.numel() <= most:
            taken.append(one)
    elements = sum(one.numel() for one in taken)
    line: dict[str, Any] = {"part": "optimizer", "parameters": elements}
    line["of"] = sum(one.numel() for one in parameters.values())
    with seconds(line, "pinning_seconds"):
        made = make_adamw(taken, config, MasterWeights())
    line["pinned_gb_per_second"] = round(8 * elements / 1e9 / line["pinning_seconds"], 2)
    moments = [made.state[one][name] for one in taken for name in MOMENTS]
    line["pinned"] = CUDA and all(one.is_pinned() for one in moments)
    yield line
    for number, one in enumerate(taken):
        one.grad = torch.full_like(one, 1e-3).mul_(1 + number % 7)
    old = taken if shape in BEFORE else []
    values = [torch.empty_like(one.detach(), device="cpu").copy_(one.detach()) for one in old]
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    times = []
    for _ in range(STEPS):
        step: dict[str, Any] = {}
        with seconds(step, "step"):
            made.step()
        times.append(step["step"])
    middle = statistics.median(times)
    line = {"part": "optimizer", "way": "new", "parameters": elements, "step_seconds": middle}
    line["all"] = times
    line["gb_per_second_each_way"] = round(8 * elements / 1e9 / middle, 2)
    if CUDA:
        line["device_gib"] = round((torch.cuda.max_memory_allocated() - held) / 2**30, 2)
    yield line
    if shape not in BEFORE:
        for one in taken:
            one.grad = None
        return
    after = [one.detach().clone() for one in taken]
    for one, value in zip(taken, values, strict=True):
        one.detach().copy_(value)
    state = {one: [torch.zeros_like(one, device="cpu") for _ in MOMENTS] for one in taken}
    steps = {one: torch.zeros((), device=DEVICE) for one in taken}
    times = []
    for _ in range(STEPS):
        step = {}
        with seconds(step, "step"):
            for one in taken:
                _step_before(one, state[one], steps[one], config)
        times.append(step["step"])
    equal = all(torch.equal(one.detach(), new) for one, new in zip(taken, after, strict=True))
    equal_moments = all(
        torch.equal(mine, made.state[one][name])
        for one in taken
        for name, mine in zip(MOMENTS, state[one], strict=True)
    )
    for one in taken:
        one.grad = None
    yield {
        "part": "optimizer",
        "way": "before",
        "parameters": elements,
        "step_seconds": statistics.median(times),
        "all": times,
        "equal_weights": equal,
        "equal_moments": equal_moments,
    }


@torch.no_grad()
def _step_before(own: nn.Parameter, kept: list[Tensor], steps: Tensor, config: TrainConfig) -> None:
    """A parameter's step with moments fetched whole from memory that is not pinned."""
    assert own.grad is not None
    near = [moment.to(own.device, torch.float32) for moment in kept]
    adamw(
        [own.detach()],
        [own.grad],
        [near[0]],
        [near[1]],
        [],
        [steps],
        fused=True,
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        eps=config.adam_epsilon,
        maximize=False,
    )
    for moment, new in zip(kept, near, strict=True):
        if moment is not new:
            moment.copy_(new)


# --- versions ---------------------------------------------------------------------------------------


def versions(
    shape: str, parameters: dict[str, nn.Parameter], folder: Path
) -> Iterator[dict[str, Any]]:
    """Seconds until a version in bfloat16 can be read, to load it, and until the disk has it.

    Of small shapes the way before too.
    """
    store = Store(str(folder))
    state: dict[str, Tensor] = {name: one.detach() for name, one in parameters.items()}
    targets = {name: torch.empty_like(one, dtype=torch.bfloat16) for name, one in state.items()}
    seen = set()
    for way in ("first", "new", "before") if shape in BEFORE else ("new",):
        with before() if way == "before" else nullcontext():
            line: dict[str, Any] = {"part": "versions", "way": way}
            with seconds(line, "publish_seconds"):
                publication = _published(store, way, state, way != "before")
            ref = publication.ref
            gigabytes = ref.nbytes / 1e9
            line["gigabytes"] = round(gigabytes, 3)
            line["publish_gb_per_second"] = round(gigabytes / line["publish_seconds"], 2)
            for one in targets.values():
                one.zero_()
            with seconds(line, "load_seconds"):
                offered = LoadedWeights(store, ref)
                fill(torch.device(DEVICE), ((targets[name], one) for name, one in offered))
                held = offered.held()
            line["load_gb_per_second"] = round(gigabytes / line["load_seconds"], 2)
            line["attested"] = held.digest == ref.digest
            line["equal"] = all(
                torch.equal(targets[name], one.to(torch.bfloat16)) for name, one in state.items()
            )
            with seconds(line, "stored_seconds_later"):
                seen.add(publication.settle().digest)
            line["digests"] = len(seen)  # of all ways; 1 is right
            store.delete(store.list(ref.key))
        yield line


def _published(store: Store, run: str, state: dict[str, Tensor], behind: bool) -> Publication:
    group, way = cast("dist.ProcessGroup", Lone()), SyncBehind(store) if behind else None
    return publish_together(store, run, 1, state, {}, torch.bfloat16, group, behind=way)


@contextmanager
def before() -> Iterator[None]:
    """One thread publishes, and waits for the disk; one loads."""
    with (
        mock.patch.object(publication, "by_lanes", return_value=False),
        mock.patch.object(device_memory, "by_lanes", return_value=False),
        mock.patch.object(weights, "THREADS", 1),
    ):
        yield


def disk(folder: Path, gigabytes: float) -> Iterator[dict[str, Any]]:
    """What the folder's disk takes from eight threads, a file each: to its cache, and for good."""
    nbytes = int(gigabytes * 1e9 / 8)
    data = os.urandom(min(nbytes, 2**22))

    def write(number: int, sync: bool) -> None:
        with open(folder / f"disk-{number}", "wb", buffering=0) as file:
            for _ in range(max(nbytes // len(data), 1)):
                file.write(data)
            if sync:
                os.fsync(file.fileno())

    for sync in (False, True):
        line: dict[str, Any] = {"part": "disk", "fsync": sync}
        with seconds(line, "seconds"), ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: write(number, sync), range(8)))  # noqa: B023
        line["gb_per_second"] = round(gigabytes / max(line["seconds"], 1e-6), 2)
        yield line
    for number in range(8):
        (folder / f"disk-{number}").unlink()


@contextmanager
def seconds(line: dict[str, Any], name: str) -> Iterator[None]:
    """Put the seconds of a block into a line."""
    if CUDA:
        torch.cuda.synchronize()
    began = time.perf_counter()
    yield
    if CUDA:
        torch.cuda.synchronize()
    line[name] = round(time.perf_counter() - began, 4)


if __name__ == "__main__":
    main()
