"""Train engines in this process or in one process per rank, and batches for them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from configs.algorithm.algorithm import AlgorithmConfig
from configs.model import PretrainedModel, RandomModel
from configs.train import TrainConfig
from engines.train.contract import TrainSpec, UpdateRequest
from engines.train.fsdp_engine import FSDPEngine
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tests.engines.train.naive_training import Sample
from tests.ports import free_ports

MODEL = RandomModel(layers=2, hidden_size=64, heads=2, seed=5)
TEMPERATURE = 0.7
MAX_NEW_TOKENS = 24
RANK_TIMEOUT = 300.0  # seconds for everything that a rank does


def spec(folder: Path, run: str = "run", role: str = "actor", **train: Any) -> TrainSpec:
    settings = {"learning_rate": 1e-2, "compute_dtype": "float32", "micro_batch_tokens": 4096}
    return TrainSpec(
        model=MODEL,
        model_cache=str(folder / "models"),
        train=TrainConfig(**{**settings, **train}),
        role=role,
        store_uri=str(folder / "store"),
        run=run,
        total_steps=8,
    )


def engine_of(directory: Path, folder: Path, **train: Any) -> FSDPEngine:
    """Of a model's files, whose names its versions have."""
    update = {"model": PretrainedModel(path=str(directory)), "version_names": "files"}
    return FSDPEngine(spec(folder, **train).model_copy(update=update))


def update_of(batch: BatchRef, algorithm: AlgorithmConfig, step: int) -> UpdateRequest:
    """With the settings of these tests."""
    return UpdateRequest(
        step=step,
        batch=batch,
        algorithm=algorithm,
        temperature=TEMPERATURE,
        max_new_tokens=MAX_NEW_TOKENS,
    )


def samples(seed: int = 0, groups: int = 4, per_group: int = 3) -> list[Sample]:
    """Groups that share a prompt; tool output in the middle, one empty response."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(groups):
        prompt = random.integers(4, 90, random.integers(3, 14))
        for _ in range(per_group):
            length = int(random.integers(1, MAX_NEW_TOKENS))
            mask = np.ones(length, dtype=np.uint8)
            mask[length // 3 : length // 2] = 0
            found.append(
                Sample(
                    prompt=prompt,
                    response=random.integers(4, 90, length),
                    mask=mask,
                    advantages=np.full(length, random.normal(), dtype=np.float32),
                )
            )
    nothing = np.zeros(0, dtype=np.float32)
    found[1] = Sample(
        prompt=found[1].prompt,
        response=nothing.astype(np.int64),
        mask=nothing.astype(np.uint8),
        advantages=nothing,
    )
    return found


def stored(folder: Path, rows: list[Sample], name: str = "batch") -> BatchRef:
    groups = np.cumsum([0, *(a.prompt is not b.prompt for a, b in pairwise(rows))])
    columns: dict[str, object] = {
        "prompt_ids": [row.prompt for row in rows],
        "response_ids": [row.response for row in rows],
        "response_mask": [row.mask for row in rows],
        "advantages": [row.advantages for row in rows],
        "group_id": groups.astype(np.int64),
    }
    for column, values in (
        ("old_logprobs", [row.old for row in rows]),
        ("ref_logprobs", [row.ref for row in rows]),
        ("rollout_logprobs", [row.rollout for row in rows]),
        ("staleness", [row.staleness for row in rows]),
    ):
        if all(value is not None for value in values):
            columns[column] = values
    return write_batch(Store(str(folder / "store")), f"run/{name}.safetensors", columns)


class Ranks:
    """A process for each rank, for several calls; forked from one that has imported torch."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.engines.train.rank_image"])
        self._processes = [ProcessPoolExecutor(1, mp_context=context) for _ in range(world)]

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """work(rank, world, ports, *arguments) in every process; results in rank order."""
        ports, world = free_ports(4), len(self._processes)
        pending = [
            process.submit(work, rank, world, ports, *arguments)
            for rank, process in enumerate(self._processes)
        ]
        return [result.result(timeout=RANK_TIMEOUT) for result in pending]

    def close(self) -> None:
        for process in self._processes:
            process.shutdown(cancel_futures=True)
