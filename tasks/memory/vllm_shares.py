"""The share of a GPU that a vLLM is given: room for a longest sample, and for others beside it."""

from __future__ import annotations

import math
from dataclasses import replace

from engines.workers.engine import size_of
from tasks.memory.holders import MemoryDemand, Vllm
from tasks.memory.places import Place, gpu_limit, places

MOST = 0.95  # of a GPU: no share above it is named
PARTS = (2, 4, 8, 16)  # GPUs of an engine


def no_room(demand: MemoryDemand) -> str | None:
    """Of a vLLM whose share leaves no room for one longest sample, which could not start."""
    for vllm in demand.vllms():
        gpu, _ = gpu_limit(demand.config, vllm.pool)
        share = vllm.share(gpu)
        if gpu is None or share is None or share.samples:
            continue
        return (
            f"By the memory plan {vllm.holder} has {size_of(share.whole)} of a GPU of pool "
            f"{vllm.pool} ({_utilization(vllm)} = {vllm.settings.gpu_memory_utilization:g}), of "
            f"which weights take {size_of(share.weights)}, and has to hold the keys and values of at "
            f"least one sample of {share.longest} tokens, {size_of(share.longest * share.token)}. "
            f"{_larger_share(demand, vllm, gpu)}"
        )
    return None


def _utilization(vllm: Vllm) -> str:
    """Where its share is set."""
    of = f" of {vllm.whose}" if vllm.named == "rewards.functions[]" else ""
    return f"{vllm.named}.gpu_memory_utilization{of}"


def _larger_share(demand: MemoryDemand, vllm: Vllm, gpu: int) -> str:
    """The smallest share with which a longest sample fits, of as few GPUs as there must be."""
    config, beside = demand.config, 0
    for place in () if config.cluster.share_devices else places(demand):
        if place.what == f"a GPU of pool {vllm.pool}":
            beside = place.planned - place.taken[vllm.holder]
    most = min(MOST, (gpu - beside) / gpu)
    if (least := _least(vllm, gpu)) <= most:
        return f"Set {_utilization(vllm)} to {least:g} or more."
    if vllm.named != "rollout":
        return f"Set cluster.roles.{vllm.role} to a pool of larger GPUs, or take a smaller model."
    of = config.cluster.roles.pool_of
    if any(of(role) == vllm.pool for role in (*config.trained_roles, *config.frozen_roles)):
        return (
            f"Set cluster.roles.{vllm.whose} to a pool of its own, where an engine may have several "
            "GPUs."
        )
    for parts in PARTS:
        if parts <= vllm.settings.tensor_parallel_size or demand.shape.heads % parts:
            continue
        split = vllm.settings.model_copy(update={"tensor_parallel_size": parts})
        least = _least(replace(vllm, settings=split), gpu)
        if least <= most:
            words = f"rollout.tensor_parallel_size={parts} cluster.pools.{vllm.pool}.gpus={parts}"
            more = f" rollout.gpu_memory_utilization={least:g}"
            return f"Set {words}{more * (least > split.gpu_memory_utilization)}."
    return "Choose a smaller model."


def _least(vllm: Vllm, gpu: int) -> float:
    """The smallest share, in hundredths, in which one longest sample fits."""
    share = vllm.share(gpu)
    assert share is not None
    return math.ceil(100 * share.least / gpu) / 100


def smaller_share(demand: MemoryDemand, place: Place) -> str:
    """What to set where vLLMs that sample take most of a GPU that cannot hold all."""
    config, gpu = demand.config, place.limit
    assert gpu is not None
    mine = [one for one in demand.vllms() if one.holder in place.taken and one.named == "rollout"]
    others = place.planned - sum(place.taken[one.holder] for one in mine)
    most = math.floor(100 * (gpu - others) / gpu / len(mine)) / 100
    apart = f"cluster.roles.{mine[-1].whose} to a pool of its own"
    share = mine[0].share(gpu)
    if most <= 0 or (share is not None and _least(mine[0], gpu) > most):
        in_turn = config.max_staleness == 0 and config.opponent is None and others > 0
        return f"Set {apart}{', or cluster.share_devices=true' * in_turn}."
    or_apart = f", or {apart}" * (len(mine) > 1)
    return f"Set rollout.gpu_memory_utilization to {most:g} or less{or_apart}."
