"""The part of `benchmarks.gpu` on devices that roles share: what a turn takes."""

from __future__ import annotations

import torch

from benchmarks.gpu_job import CUDA, Found, Job, free, has_vllm, stored
from engines.workers.engine import Moved
from storage.runs.weights import WeightsRef


def sleep(job: Job) -> Found:
    """Seconds and bytes of a turn on a shared device: the trainer away and back, engines to sleep."""
    found, batch = Found(), stored(job)
    engine = job.train_engine()
    engine.update(job.request(1, batch))
    weights, before = engine.export_weights(1, job.compute), engine.digest()
    for turn in ("first", "next"):  # pinned memory is made in the first
        _put(found, f"trainer_sleep_{turn}", engine.offload())
        if turn == "next":
            found.metrics["device_gib_left"] = _device_gib()
            for kind in ("transformers", "vllm") if CUDA and has_vllm() else ("transformers",):
                _sleep_and_wake(job, kind, weights, found)
        _put(found, f"trainer_wake_{turn}", engine.onload())
    if engine.digest() != before:
        found.failed = "the trainer came back with other weights"
    engine.close()
    return found


def _sleep_and_wake(job: Job, kind: str, weights: WeightsRef, found: Found) -> None:
    sampler = job.rollout_engine(kind, sleeps=True)
    try:
        for level in (1, 2):
            sampler.sync(weights)
            _put(found, f"{kind}_sleep_level_{level}", sampler.sleep(level))
            found.metrics[f"{kind}_asleep_level_{level}_device_gib"] = _device_gib()
            woken = sampler.wake()
            _put(found, f"{kind}_wake_level_{level}", woken)
            if (woken.digest == weights.digest) != (level == 1):
                found.failed = f"{kind} holds {woken.digest or 'nothing'} after level {level}"
    finally:
        sampler.close()
        free()


def _put(found: Found, name: str, moved: Moved) -> None:
    found.metrics[f"{name}_seconds"] = round(moved.seconds, 4)
    found.metrics[f"{name}_mbytes"] = round(moved.nbytes / 1e6, 3)


def _device_gib() -> float:
    """What all processes hold of the device; of a CPU nothing is said."""
    if not CUDA:
        return 0.0
    left, total = torch.cuda.mem_get_info()
    return round((total - left) / 2**30, 2)
