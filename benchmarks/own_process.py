"""What a trainer and vLLM in one worker cost each other, and what vLLM in a process of its own saves.

    python -m benchmarks.own_process [--rounds 3] [--seconds 10] [--sequences 64]

The trainer is a stand-in for one that launches kernels for a GPU: a thread that runs operations of
microseconds one after the other, in Python. Beside it vLLM samples with a tiny model. Printed, as a
line of JSON: operations and tokens a second of each alone and of both beside each other, with vLLM in
the trainer's process and in one of its own, medians of the rounds, which take turns. On a GPU vLLM's
model needs no processor; here it needs one, and the two of them and vLLM's front end want three.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engines.rollout.contract import RolloutRequest, Sampler, Sampling


class Trainer:
    """A thread that runs short operations."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count operations during the body."""
        import torch

        over, numbers = threading.Event(), torch.zeros(64)

        def run() -> None:
            while not over.is_set():
                for _ in range(100):
                    numbers.add_(1.0)
                self.count += 100

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def sampled(engine: Sampler, request: RolloutRequest, seconds: float) -> float:
    """Tokens a second of shards one after the other, for so many seconds."""
    began, tokens = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        shard = dataclasses.replace(request, out_key=f"{request.out_key}-{time.monotonic_ns()}")
        tokens += engine.generate(shard).stats.tokens
    return tokens / (time.monotonic() - began)


def compared(
    engines: Mapping[str, Sampler], request: RolloutRequest, rounds: int, seconds: float
) -> dict[str, float]:
    """Medians of operations and tokens a second, by what ran beside what."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        trainer, began = Trainer(), time.monotonic()
        with trainer.running():
            time.sleep(seconds)
        found.setdefault("operations_alone", []).append(trainer.count / (time.monotonic() - began))
        for name, engine in engines.items():
            alone = sampled(engine, request, seconds)
            found.setdefault(f"tokens_alone_{name}", []).append(alone)
            trainer, began = Trainer(), time.monotonic()
            with trainer.running():
                beside = sampled(engine, request, seconds)
            found.setdefault(f"tokens_beside_{name}", []).append(beside)
            found.setdefault(f"operations_beside_{name}", []).append(
                trainer.count / (time.monotonic() - began)
            )
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    """Run it, and print one line of JSON."""
    from configs.model import RandomModel
    from configs.rollout import RolloutConfig
    from engines.models import checkpoints
    from engines.rollout.contract import RolloutSpec
    from engines.rollout.vllm_engine import VllmEngine
    from engines.rollout.vllm_own_process import VllmInOwnProcess
    from storage.batches.writing import write_batch
    from storage.objects.store import Store
    from storage.runs.weights_writing import publish

    arguments = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="refrain-benchmark-") as folder:
        store, model = Store(f"file://{folder}/store"), RandomModel(seed=3)
        directory = checkpoints.materialize(model, Path(folder) / "models")
        policy = checkpoints.load_for_training(directory)
        files = checkpoints.companion_files(directory)
        weights = publish(store, "bench", 0, policy.state_dict().items(), files)
        spec = RolloutSpec(
            model=model,
            model_cache=f"{folder}/models",
            rollout=RolloutConfig(
                engine="vllm",
                dtype="float32",
                kv_cache_gib=1.0,
                max_sequences=arguments.sequences,
            ),
            store_uri=store.uri,
            max_model_len=256,
        )
        prompts = write_batch(
            store,
            "prompts.safetensors",
            {"prompt_ids": [[5, 6, 7, 8]], "group_id": [0], "prompt_row": [0]},
        )
        request = RolloutRequest(
            prompts=prompts,
            sampling=Sampling(n=arguments.sequences, max_new_tokens=200, ignore_eos=True),
            out_key="samples",
            step=0,
            shard=0,
        )
        engines = {"shared": VllmEngine(spec), "own": VllmInOwnProcess(spec)}
        try:
            for engine in engines.values():
                engine.sync(weights)
                engine.generate(request)
            medians = compared(engines, request, arguments.rounds, arguments.seconds)
        finally:
            for engine in engines.values():
                engine.close()
    print(json.dumps({name: round(value) for name, value in medians.items()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--sequences", type=int, default=64, help="sampled at once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
