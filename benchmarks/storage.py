"""How fast batches and policy versions are stored, against bare safetensors in the same run.

    python -m benchmarks.storage [--store URI] [--batch-mb 100] [--weights-mb 270] [--repeats 7]

Each figure is the median of the repeats, both sides alternating in one process. The bare side is
`safetensors.torch.save_file` and `load_file` on one local file: no digests, no atomic appearance,
no fsync (a second bare write with fsync is shown, to tell the disk's time from ours). Reads touch
every byte on both sides, by a sum. Pages are warm, as they are between two stages of a step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, stream
from storage.runs.weights_writing import publish

MB = 10**6


def batch_columns(megabytes: int) -> dict[str, torch.Tensor]:
    """About so many MB: token ids, masks and log-probs of rows of 50 to 950 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = megabytes * MB // (8 + 8 + 4 + 4 + 4)
    lengths = torch.randint(50, 950, (2 * tokens // 1000 + 10,), generator=generator)
    rows = int((lengths.cumsum(0) < tokens).sum())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[:rows].cumsum(0)])
    count = int(offsets[-1])

    def jagged(values: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    return {
        "prompt_ids": jagged(torch.randint(0, 50000, (count,), generator=generator)),
        "response_ids": jagged(torch.randint(0, 50000, (count,), generator=generator)),
        "rollout_logprobs": jagged(torch.randn(count, generator=generator)),
        "old_logprobs": jagged(torch.randn(count, generator=generator)),
        "advantages": jagged(torch.randn(count, generator=generator)),
        "reward": torch.randn(rows, generator=generator),
    }


def model_tensors(megabytes: int) -> dict[str, torch.Tensor]:
    """About so many MB of bfloat16 in the shapes of SmolLM2-135M's layers."""
    shapes = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    layer = sum(a * b for a, b in shapes) * 2
    tensors = {"embed": torch.randn(49152, 576).bfloat16()}
    for number in range(max(1, (megabytes * MB - 49152 * 576 * 2) // layer)):
        for part, shape in enumerate(shapes):
            tensors[f"layers.{number}.{part}"] = torch.randn(*shape).bfloat16()
    return tensors


def touch(tensor: torch.Tensor) -> None:
    """Read every byte."""
    values = tensor.values() if tensor.is_nested else tensor
    values.contiguous().view(torch.uint8).view(-1)[: values.nbytes // 8 * 8].view(torch.int64).sum()


@dataclass(frozen=True, slots=True)
class Times:
    wall: float  # median seconds
    cpu: float  # median seconds of this process, which other processes disturb less


def clock(sides: dict[str, Callable[[int], object]], repeats: int) -> dict[str, Times]:
    """Medians of each side; the sides take turns, so a slow moment hits both."""
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats):
        for name, call in sides.items():
            start, used = time.perf_counter(), time.process_time()
            call(number)
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - used)
    return {
        name: Times(statistics.median(wall[name]), statistics.median(cpu[name])) for name in sides
    }


def bare_write(tensors: dict[str, torch.Tensor], path: Path, sync: bool) -> None:
    save_file(tensors, path)
    if sync:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def bare_read(path: Path) -> None:
    for tensor in load_file(path).values():
        touch(tensor)


def measure_batch(store: Store, folder: Path, megabytes: int, repeats: int) -> dict[str, Times]:
    columns = batch_columns(megabytes)
    flat = {n: (t.values() if t.is_nested else t).contiguous() for n, t in columns.items()}
    refs: dict[int, BatchRef] = {}

    def write(number: int) -> None:
        refs[number] = write_batch(store, f"bench/batch-{number}.safetensors", columns)

    def read(number: int) -> None:
        found = refs[number].fetch(store)
        for name in columns:
            touch(found[name])

    times = clock(
        {
            "batch write": write,
            "batch write, bare": lambda n: bare_write(flat, folder / f"b{n}", False),
            "batch write, bare + fsync": lambda n: bare_write(flat, folder / f"s{n}", True),
        },
        repeats,
    )
    times |= clock(
        {
            "batch read": read,
            "batch read, bare": lambda n: bare_read(folder / f"b{n}"),
            "one row of 4 columns": lambda n: refs[n].rows(7, 8).drop(["prompt_ids"]).fetch(store),
        },
        repeats,
    )
    store.delete([key for ref in refs.values() for key in ref.objects])
    return times


def measure_weights(store: Store, folder: Path, megabytes: int, repeats: int) -> dict[str, Times]:
    tensors = model_tensors(megabytes)
    refs: dict[int, WeightsRef] = {}

    def write(number: int) -> None:
        refs[number] = publish(
            store, "bench", number, iter(tensors.items()), {"config.json": b"{}"}
        )

    def read(number: int) -> None:
        for _, tensor in stream(store, refs[number]):
            touch(tensor)

    times = clock(
        {
            "weights publish": write,
            "weights publish, bare": lambda n: bare_write(tensors, folder / f"w{n}", False),
            "weights publish, bare + fsync": lambda n: bare_write(tensors, folder / f"v{n}", True),
        },
        repeats,
    )
    times |= clock(
        {
            "weights stream": read,
            "weights stream, bare": lambda n: bare_read(folder / f"w{n}"),
        },
        repeats,
    )
    store.delete(store.list("bench/weights"))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", help="fsspec address; default: a temporary folder")
    parser.add_argument("--folder", type=Path, help="where both sides write; default: temporary")
    parser.add_argument("--batch-mb", type=int, default=100)
    parser.add_argument("--weights-mb", type=int, default=270)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-storage-", dir=options.folder))
    try:
        store = Store(options.store or f"file://{folder}/store")
        times = measure_batch(store, folder, options.batch_mb, options.repeats)
        times |= measure_weights(store, folder, options.weights_mb, options.repeats)
    finally:
        shutil.rmtree(folder)
    print(f"{'':32} {'wall ms':>9} {'CPU ms':>9}   ratio to bare (wall, CPU)")
    for name, took in times.items():
        line = f"{name:32} {1000 * took.wall:9.1f} {1000 * took.cpu:9.1f}"
        if bare := times.get(f"{name}, bare"):
            line += f"   {took.wall / bare.wall:.2f} {took.cpu / bare.cpu:.2f}"
        print(line)


if __name__ == "__main__":
    main()
