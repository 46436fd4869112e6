"""Seconds in which one transformers engine samples a step in few and in many shards.

    python -m benchmarks.shards [--other FOLDER --prompts 64 --group 2 --shards 8 64 --rounds 5]

Recipe `tiny`, its model, all shards in flight at once, as with so many slots of the rollout pool.
`--other` is a second checkout; the two take turns, each round in processes of its own. `--engines 2`
divides the shards among as many processes with a thread each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]


def sample(options: argparse.Namespace) -> dict[str, object]:
    """Sample once to warm up, then print the seconds and the digest of all tokens and log-probs."""
    import torch

    from configs.model import RandomModel
    from configs.rollout import RolloutConfig
    from engines.models import checkpoints
    from engines.rollout.contract import RolloutRequest, RolloutSpec, Sampling
    from engines.rollout.hf_engine import HFEngine
    from storage.batches.writing import write_batch
    from storage.objects.store import Store
    from storage.runs.weights_writing import publish

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"file://{folder}/store")
        model = RandomModel(layers=2, hidden_size=64, heads=2, max_positions=256)
        directory = checkpoints.materialize(model, Path(folder) / "models")
        state = checkpoints.load_for_training(directory).state_dict()
        weights = publish(store, "run", 0, state.items(), checkpoints.companion_files(directory))
        spec = RolloutSpec(
            model=model,
            model_cache=f"{folder}/models",
            rollout=RolloutConfig(engine="transformers", dtype="float32", max_sequences=256),
            store_uri=store.uri,
            max_model_len=128,
        )
        engine = HFEngine(spec)
        engine.sync(weights)
        chance = np.random.default_rng(0)
        prompts = [chance.integers(4, 90, chance.integers(6, 24)) for _ in range(options.prompts)]
        columns = {"prompt_ids": prompts, "group_id": np.arange(len(prompts))}
        batch = write_batch(store, "prompts.safetensors", columns)
        sampling = Sampling(n=options.group, max_new_tokens=options.tokens, seed=0)

        def once(label: str) -> tuple[float, str]:
            parts = np.array_split(np.arange(len(prompts)), options.shards[0])
            mine = list(enumerate(parts))[options.engine :: options.engines]
            requests = [
                RolloutRequest(
                    prompts=batch.take(part.tolist()),
                    sampling=sampling,
                    out_key=f"{label}/{number}.safetensors",
                    step=1,
                    shard=number,
                )
                for number, part in mine
            ]
            with ThreadPoolExecutor(len(requests)) as threads:
                began = time.perf_counter()
                results = list(threads.map(engine.generate, requests))
                spent = time.perf_counter() - began
            found = hashlib.sha256()
            for column in ("response_ids", "rollout_logprobs"):
                for result in results:
                    found.update(result.ref.fetch_numpy(store, column)[0].tobytes())
            return spent, found.hexdigest()[:12]

        once("warm")
        seconds, digest = once("timed")
        engine.close()
    return {"seconds": seconds, "digest": digest}


def main() -> None:
    """Let the sides take turns and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="a second checkout")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--shards", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        print(json.dumps(sample(options)))
        return
    sides = [ROOT, *([options.other.resolve()] if options.other else [])]
    for shards in options.shards:
        seconds: dict[Path, list[float]] = {side: [] for side in sides}
        digests: dict[Path, set[tuple[str, ...]]] = {side: set() for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                found = measured(side, shards, options)
                seconds[side].append(max(each["seconds"] for each in found))
                digests[side].add(tuple(each["digest"] for each in found))
        for side in sides:
            median, all_of = statistics.median(seconds[side]), [round(s, 3) for s in seconds[side]]
            print(f"{side.name}, {shards} shards: {median:.3f} s of {all_of}, {digests[side]}")


def measured(side: Path, shards: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each engine's process says, all of them at once."""
    words = [
        sys.executable,
        "-P",
        __file__,
        "--shards",
        str(shards),
        "--engines",
        str(options.engines),
    ]
    for name in ("prompts", "group", "tokens", "threads"):
        words += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "PYTHONPATH": str(side)}
    started = [
        subprocess.Popen(
            [*words, "--engine", str(number)],
            cwd=side,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(options.engines)
    ]
    return [json.loads(each.communicate()[0].splitlines()[-1]) for each in started]


if __name__ == "__main__":
    main()
