"""The parts of `benchmarks.gpu` on policy versions: adapters, and the ways that weights go."""

from __future__ import annotations

import uuid
from typing import Any

from benchmarks.gpu_job import CUDA, Found, Job, free, has_vllm, rows, stored, timed
from benchmarks.weight_transfer import compared
from configs.lora import LoraConfig
from engines.rollout.engine import RolloutEngine
from engines.train.fsdp_engine import FSDPEngine
from engines.weight_transfer.offer import Transfer
from storage.objects.errors import ObjectMissing
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, open_manifest

ROUNDS = 3  # of a transfer, after the first
EVERY = 4  # versions of which one is stored whole
FORM = "bfloat16"  # of versions; in float32 none is stored as a difference
GAP = 0.5  # nats of a token: weights rounded to bfloat16, and on a GPU products too


def lora(job: Job) -> Found:
    """An adapter in the trainer, and merged into its base where it samples: the same log-probs."""
    spec = job.train_spec(lora=LoraConfig(rank=16), run=f"gpu-{job.shape}-lora")
    train = spec.train.model_copy(update={"learning_rate": 1e-3})
    engine = job.joined(spec.model_copy(update={"train": train}))
    found = Found()
    sequences, lengths = _sequences(job)
    base = engine.score(sequences, lengths)
    engine.update(job.request(1, stored(job)))
    weights = engine.export_weights(1, FORM)
    found.metrics["adapter_mbytes"] = round(weights.nbytes / 1e6, 3)
    expected, digest = engine.score(sequences, lengths), engine.digest(FORM)
    found.metrics["moved_nats"] = _farthest(expected, base)
    engine.close()
    free()
    if digest != weights.digest:
        found.failed = f"the trainer holds {digest}, published was {weights.digest}"
    if not found.metrics["moved_nats"]:
        found.failed = "an update of the adapter changed no log-prob"
    for kind in _kinds():
        sampler = job.rollout_engine(kind)
        try:
            _synced(found, job, sampler, f"{kind}_merged", weights, expected)
        finally:
            sampler.close()
            free()
    return found


def sync_paths(job: Job) -> Found:
    """Seconds of a version on its way: whole, as a difference, and before the store has it."""
    found = Found()
    spec = job.train_spec(whole_every=EVERY, run=f"gpu-{job.shape}-paths")
    engine = job.joined(spec)
    ways = {"whole": _published(found, job, engine, "whole", 0)}
    engine.settle_weights(0, FORM)  # the next one is the difference from what the store has
    engine.update(job.request(1, stored(job)))
    ways["difference"] = _published(found, job, engine, "difference", 1)
    if open_manifest(Store(job.store), ways["difference"]).base is None:
        found.failed = "the second version is stored whole"
    expected = engine.score(*_sequences(job))
    engine.close()
    free()
    for kind in _kinds():
        sampler = job.rollout_engine(kind)
        try:
            for way, weights in ways.items():
                wanted = expected if way == "difference" else None
                _synced(found, job, sampler, f"{kind}_{way}", weights, wanted)
        finally:
            sampler.close()
            free()
    return _before_the_store(found, job, ways["whole"].nbytes)


def transfer(job: Job) -> Found:
    """A version's way into an engine beside the trainer: by the store, and past it.

    On one GPU trainer and engine are both there at once, and NCCL has no two ranks on one.
    """
    found = Found()
    engine = job.joined(job.train_spec(run=f"gpu-{job.shape}-transfer"))
    ways: tuple[Transfer, ...] = ("ipc",) if CUDA else ("ipc", "nccl")
    for kind in _kinds():
        sampler = job.rollout_engine(kind)
        try:
            medians = compared(engine, sampler, ways, FORM, ROUNDS)
        except RuntimeError as error:
            found.failed = f"{kind}: {error}"
        else:
            found.metrics |= {f"{kind}_{name}": value for name, value in medians.items()}
        finally:
            sampler.close()
            free()
    engine.close()
    return found


def _before_the_store(found: Found, job: Job, nbytes: int) -> Found:
    """The transformers engine reads what this machine has, while the store has no version yet.

    The store is this process's memory, which counts as a remote one; vLLM, another process, has none.
    """
    store = f"memory://gpu-{uuid.uuid4().hex[:8]}"
    kept: dict[str, Any] = {"store_uri": store, "node_cache_bytes": 4 * nbytes}
    engine = job.joined(job.train_spec(**kept, run=f"gpu-{job.shape}-before"))
    weights = _published(found, job, engine, "before_the_store", 0)
    expected = engine.score(*_sequences(job))
    try:
        open_manifest(Store(store), weights)
        found.failed = "the store had the version before it was settled"
    except ObjectMissing:
        pass
    sampler = job.rollout_engine("transformers", **kept)
    try:
        _synced(found, job, sampler, "transformers_before_the_store", weights, expected)
    finally:
        sampler.close()
    with timed(found.metrics, "settle_seconds"):
        settled = engine.settle_weights(0, FORM)
    open_manifest(Store(store), settled)
    engine.close()
    free()
    return found


def _kinds() -> tuple[str, ...]:
    return ("transformers", "vllm") if has_vllm() else ("transformers",)


def _sequences(job: Job) -> tuple[list[list[int]], list[int]]:
    """Four rows, and how many of their tokens are the prompt."""
    data = rows(job)
    pairs = [(data["prompt_ids"][n].tolist(), data["response_ids"][n].tolist()) for n in range(4)]
    return [prompt + response[:32] for prompt, response in pairs], [job.prompt] * 4


def _published(found: Found, job: Job, engine: FSDPEngine, way: str, version: int) -> WeightsRef:
    with timed(found.metrics, f"{way}_publish_seconds"):
        weights = engine.export_weights(version, FORM)
    store = Store(job.store)  # which a version that is on its way to another store is not in
    nbytes = sum(store.size(key) for key in store.list(weights.key))
    found.metrics[f"{way}_mbytes"] = round((nbytes or weights.nbytes) / 1e6, 3)
    return weights


def _synced(
    found: Found,
    job: Job,
    sampler: RolloutEngine,
    name: str,
    weights: WeightsRef,
    expected: list[list[float]] | None,
) -> None:
    """Sync an engine; what it attests is what was published, and it scores as the trainer does."""
    with timed(found.metrics, f"{name}_sync_seconds"):
        report = sampler.sync(weights)
    if report.digest != weights.digest:
        found.failed = f"{name}: it holds {report.digest}, published was {weights.digest}"
    if expected is None:
        return
    gap = _farthest(sampler.score(*_sequences(job)), expected)
    found.metrics[f"{name}_gap_nats"] = gap
    if gap > GAP:
        found.failed = f"{name}: it scores a token {gap:.2g} nats away from the trainer"


def _farthest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """The largest difference of a token's log-probs."""
    return max(
        abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )
