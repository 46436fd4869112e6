"""What `benchmarks.gpu` checks and measures: a function for each part, each in its own process."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_job import (
    CUDA,
    DEVICE,
    Found,
    Job,
    free,
    has_vllm,
    plan,
    rows,
    stored,
    timed,
)
from engines.rollout.contract import RolloutRequest, Sampling
from engines.train.model.compiled import lacking
from engines.workers.engine import Memory
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tasks.commands.replay import TOLERANCE, share_of_way

# --- checks -----------------------------------------------------------------------------------------


def logprobs(job: Job) -> Found:
    """The packed forward pass against plain ones of transformers: no further from float32."""
    from transformers import AutoModelForCausalLM

    data = rows(job)
    some = list(range(0, job.samples, max(1, job.samples // 8)))
    pairs = [(data["prompt_ids"][n].tolist(), data["response_ids"][n].tolist()) for n in some]

    def plain(dtype: torch.dtype) -> torch.Tensor:
        model: Any = AutoModelForCausalLM.from_pretrained(job.model().path, dtype=dtype)
        model = model.to(DEVICE)
        parts = []
        for prompt, response in pairs:
            ids = torch.tensor([prompt + response], device=DEVICE)
            with torch.no_grad():
                table = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            parts.append(
                table.gather(1, torch.tensor(response, device=DEVICE)[:, None])[:, 0].cpu()
            )
        return torch.cat(parts)

    exact = plain(torch.float32)
    ordinary = plain(getattr(torch, job.compute))
    free()
    engine = job.train_engine()
    whole = [prompt + response for prompt, response in pairs]
    packed = engine.score(whole, [len(prompt) for prompt, _ in pairs])
    ours = torch.tensor([value for row in packed for value in row])
    engine.close()
    off, usual = (float((x - exact).abs().mean()) for x in (ours, ordinary))
    found = Found(metrics={"packed_off_nats": off, "plain_off_nats": usual, "tokens": len(exact)})
    if off > 1.5 * usual + 1e-4:
        found.failed = f"packed log-probs are {off:.2g} nats off float32, plain ones {usual:.2g}"
    return found


def round_trip(job: Job) -> Found:
    """Weights to the store and into the other engine: the same digest, the same log-probs."""
    found = Found()
    engine = job.train_engine()
    with timed(found.metrics, "publish_seconds"):
        weights = engine.export_weights(0, job.compute)
    found.metrics["gbytes"] = round(weights.nbytes / 1e9, 3)
    data = rows(job)
    sequences = [
        data["prompt_ids"][n].tolist() + data["response_ids"][n].tolist()[:32] for n in range(4)
    ]
    lengths = [job.prompt] * 4
    expected = engine.score(sequences, lengths)
    engine.close()
    free()
    for kind in ("transformers", "vllm") if has_vllm() else ("transformers",):
        with timed(found.metrics, f"{kind}_start_seconds"):
            rollout = job.rollout_engine(kind)
        try:
            with timed(found.metrics, f"{kind}_sync_seconds"):
                report = rollout.sync(weights)
            scores = rollout.score(sequences, lengths)
        finally:
            rollout.close()
            free()
        gap = max(
            abs(a - b)
            for x, y in zip(scores, expected, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        found.metrics[f"{kind}_gap_nats"] = gap
        if report.digest != weights.digest:
            found.failed = f"{kind} holds {report.digest}, published was {weights.digest}"
        elif gap > (0.5 if CUDA else 0.01):
            found.failed = f"{kind} scores a token {gap:.2g} nats away from the trainer"
    return found


def replay(job: Job) -> Found:
    """The same update twice from one snapshot: whether it is equal to the bit, and how far if not."""
    found = Found()
    for fixed in (False, True):
        name = "update_again" + "_deterministic" * fixed
        engine, batch = job.train_engine(learning_rate=1e-4, deterministic=fixed), stored(job)
        engine.save_state(0)
        engine.update(job.request(1, batch))
        digest, weights = engine.digest(), engine.export_weights(100 + fixed, job.compute)
        engine.load_state(0)
        way = engine.compare(weights, job.compute)
        engine.update(job.request(1, batch))
        equal = engine.digest() == digest
        share = share_of_way(engine.compare(weights, job.compute), way)
        engine.close()
        free()
        found.metrics[name] = "equal to the bit" if equal else "not equal to the bit"
        found.metrics[f"{name}_share_of_way"] = share
        if not way.differing:
            found.failed = "an update changed no weight"
        elif not equal and (fixed or not CUDA):
            found.failed = f"{name}: it is to be equal to the bit, and is not"
        elif share > TOLERANCE:
            found.failed = f"{name}: {share:.2%} of the way came out otherwise"
    return found


def master_weights(job: Job) -> Found:
    """An update of float32 weights, and of bfloat16 ones with float32 masters: the same bits."""
    found, digests = Found(), set[str]()
    memory: Memory = "device" if CUDA else "host"
    for dtype in ("float32", "bfloat16"):
        train: dict[str, Any] = {"compute_dtype": "bfloat16", "weights_dtype": dtype}
        train["deterministic"] = True
        engine, batch = job.train_engine(**train, learning_rate=1e-4), stored(job)
        before = engine.digest()
        engine.update(job.request(1, batch))  # the first warms up
        began = time.perf_counter()
        engine.update(job.request(2, batch))
        found.metrics[f"{dtype}_seconds"] = time.perf_counter() - began
        held = engine.memory_held(memory)["weights"]
        found.metrics[f"{dtype}_weights_gib"] = held / 2**30
        digests.add(engine.digest())
        if before in digests:
            found.failed = "an update changed no weight"
        engine.close()
        free()
    if len(digests) > 1:
        found.failed = "the weights are to be equal to the bit, and are not"
    return found


def ranks(job: Job) -> Found:
    """Two ranks, with rows of their own and sharing sequences, against one: the same gradient."""
    if CUDA and torch.cuda.device_count() < 2:
        return Found(skipped="there is one device; two ranks need two")
    stored(job)
    job.model()
    found = Found()
    for shared in (1, 2):
        (one, *_), many = _updated(job, 1, 1), _updated(job, 2, shared)
        how = "fsdp" if shared == 1 else "sequence_parallel"
        gap = max(abs(each / one - 1) for each in many)
        found.metrics[f"{how}_gradient_norm_off"] = gap
        if gap > (0.02 if CUDA else 1e-4):
            found.failed = f"two ranks ({how}) have a gradient of norm {many[0]:.6g}, one {one:.6g}"
    return found


def _updated(job: Job, world: int, shared: int) -> list[float]:
    """The gradient's norm of an update by so many ranks, as each of them says."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pools = [ProcessPoolExecutor(1, mp_context=context) for _ in range(world)]
    try:
        pending = [
            pool.submit(_update_of_rank, job, rank, world, port, shared)
            for rank, pool in enumerate(pools)
        ]
        return [one.result(timeout=240) for one in pending]
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _update_of_rank(job: Job, rank: int, world: int, port: int, shared: int) -> float:
    if CUDA:
        torch.cuda.set_device(rank)
    engine = job.train_engine(rank, world, port, sequence_parallel=shared)
    metrics = engine.update(job.request(1, stored(job))).metrics
    engine.close()
    return metrics["train/grad_norm"]


# --- measurements -----------------------------------------------------------------------------------


def update_compiled(job: Job) -> Found:
    """The same with compiled layers."""
    if lack := lacking(gpu=CUDA):
        return Found(skipped=lack)
    return update(job, compile=True)


def update(job: Job, **train: Any) -> Found:
    """Tokens a second, share of the device's peak, and peak memory beside the plan's."""
    engine, batch = job.train_engine(**train), stored(job)
    first: dict[str, float | str] = {}
    with timed(first, "first_seconds"):  # warms up, and compiles
        engine.update(job.request(1, batch))
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    metrics = engine.update(job.request(2, batch)).metrics
    engine.close()
    wanted = ("tokens", "tokens_per_second", "seconds", "flops_per_second", "mfu")
    found = Found(metrics={n: metrics[f"train/{n}"] for n in wanted if f"train/{n}" in metrics})
    found.metrics |= first
    for name, value in metrics.items():
        phase = name.removeprefix("train/")
        if phase.endswith("_seconds"):
            found.metrics[phase] = round(value, 3)
    if CUDA:
        found.metrics["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    used = job.train_spec().train
    found.metrics["plan_gib"] = round(plan(job, used).peak / 2**30, 3)
    set_here = used.model_dump(exclude_defaults=True, exclude={"learning_rate", "compute_dtype"})
    found.metrics["settings"] = " ".join(f"{name}={value}" for name, value in set_here.items())
    return found


def rollout(job: Job) -> Found:
    """Tokens a second of the rollout engines, all samples at once."""
    found, store = Found(), Store(job.store)
    random = np.random.default_rng(0)
    groups = max(1, job.samples // 8)
    prompts = write_batch(
        store,
        f"prompts-{job.shape}.safetensors",
        {
            "prompt_ids": [random.integers(10, 90, job.prompt) for _ in range(groups)],
            "group_id": np.arange(groups),
            "prompt_row": np.arange(groups),
        },
    )
    engine = job.train_engine()
    weights = engine.export_weights(0, job.compute)
    engine.close()
    free()
    for kind in ("vllm", "transformers") if has_vllm() else ("transformers",):
        sampler = job.rollout_engine(kind)
        try:
            sampler.sync(weights)
            rates = []
            for number, most in enumerate((job.response // 8, job.response)):  # the first warms up
                request = RolloutRequest(
                    prompts=prompts,
                    sampling=Sampling(n=8, max_new_tokens=most, ignore_eos=True),
                    out_key=f"samples-{job.shape}-{kind}-{number}.safetensors",
                    step=number,
                    shard=0,
                )
                began = time.perf_counter()
                stats = sampler.generate(request).stats
                rates.append(stats.tokens / (time.perf_counter() - began))
        finally:
            sampler.close()
            free()
        found.metrics[f"{kind}_tokens_per_second"] = round(rates[-1], 1)
    return found


PARTS: dict[str, Callable[[Job], Found]] = {
    "logprobs": logprobs,
    "round_trip": round_trip,
    "replay": replay,
    "master_weights": master_weights,
    "ranks": ranks,
    "update": update,
    "update_compiled": update_compiled,
    "rollout": rollout,
}
