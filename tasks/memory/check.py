"""The memory plan: what each device and this machine will have to hold, before anything starts.

It is put together from what the engines' own plans say, and held against what there is (holders.py).
A run that cannot fit is refused with the setting that would make it fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from pydantic import ValidationError

from configs.grpo import GRPOConfig
from configs.lora import LoraConfig
from engines.models.traced_shape import Shape
from engines.workers.engine import size_of
from tasks.memory.holders import (
    HoldersOf,
    MemoryDemand,
    Place,
    Ranks,
    Vllm,
    WorkerEngine,
    episode_tokens,
    gpu_limit,
    places,
    plan_of,
    sizes_of,
)

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
    vllms = [
        vllm for vllm in demand.vllms() if vllm.holder in place.taken and vllm.named == "rollout"
    ]
    others = place.planned - sum(place.taken[vllm.holder] for vllm in vllms)
    most = math.floor(100 * (gpu - others) / gpu / len(vllms)) / 100
    apart = f"cluster.roles.{vllms[-1].whose} to a pool of its own"
    share = vllms[0].share(gpu)
    if most <= 0 or (share is not None and _least(vllms[0], gpu) > most):
        in_turn = config.max_staleness == 0 and config.opponent is None and others > 0
        return f"Set {apart}{', or cluster.share_devices=true' * in_turn}."
    or_apart = f", or {apart}" * (len(vllms) > 1)
    return f"Set rollout.gpu_memory_utilization to {most:g} or less{or_apart}."


RANKS = (2, 4, 8, 16, 32, 64)  # times as many
FEW_LOGITS = 256  # tokens, for train.logit_chunk_tokens
Settings: TypeAlias = Mapping[str, object]  # of the train engine, by name


def too_large(demand: MemoryDemand, place: Place) -> str:
    """What such a place has to hold, has, and what to set."""
    assert place.limit is not None
    sentence = (
        f"By the memory plan {place.what} has to hold {size_of(place.planned)}, and has "
        f"{size_of(place.limit)} ({place.limited_by}); most of it for {place.largest}."
    )
    for holder in demand.holders():
        if isinstance(holder, Vllm) and place.largest == holder.holder:
            return f"{sentence} {holder.remedy or smaller_share(demand, place)}"
        if isinstance(holder, WorkerEngine) and place.largest in holder.held:
            return f"{sentence} {holder.remedy(place.largest)}"
    pool_of = demand.config.cluster.roles.pool_of
    for ranks in demand.ranks():
        pool = pool_of(ranks.role)
        has_own_pool = pool != pool_of("actor") and place.what.endswith(f" of pool {pool}")
        if ranks.remedy is not None and has_own_pool:
            return f"{sentence} {ranks.remedy}"
    return f"{sentence} {_of_train_engine(demand, place)}"


def _of_train_engine(demand: MemoryDemand, place: Place) -> str:
    """The settings of the train engine that are enough, and where those are ranks an adapter too."""
    config, shape = demand.config, demand.shape
    fitting = {candidate.what for candidate in places(demand) if candidate.fits} | {place.what}

    def size_with(changed: GRPOConfig) -> str | None:
        """What the place has to hold then; None where it, or another that could, cannot."""
        by_name = {candidate.what: candidate for candidate in places(demand.under(changed))}
        enough = all(by_name[what].fits for what in fitting if what in by_name)
        return size_of(by_name[place.what].planned) if enough and _valid(changed) else None

    for words, changed in smaller(config, shape):
        if now := size_with(changed):
            return f"Set {words}: then it is {now}.{_or_adapter(config, shape, words, size_with)}"
    none = "No setting of the train engine is enough."
    return f"{none}{_or_adapter(config, shape, 'workers=', size_with)} Choose a smaller model."


def _or_adapter(
    config: GRPOConfig,
    shape: Shape,
    words: str,
    size_with: Callable[[GRPOConfig], str | None],
) -> str:
    """Where nothing but more ranks is enough: how an adapter can be trained on those there are."""
    if config.lora is not None or "workers=" not in words:
        return ""
    adapted = config.model_copy(update={"lora": LoraConfig()})
    options = [("", adapted)]
    options += [
        (f" {more}", candidate)
        for more, candidate in smaller(adapted, shape)
        if "workers=" not in more
    ]
    for more, changed in options:
        if now := size_with(changed):
            return f" Or train an adapter, lora.rank={LoraConfig().rank}{more}: then it is {now}."
    return ""


def _valid(config: GRPOConfig) -> bool:
    """Whether its settings go together."""
    try:
        type(config).model_validate(config.model_dump())
    except ValidationError:
        return False
    return True


def smaller(config: GRPOConfig, shape: Shape) -> Iterator[tuple[str, GRPOConfig]]:
    """Settings with which less memory is taken, in words too."""
    together: dict[str, object] = {}
    for options in (_same_bits(config), _other_bits(config, shape)):
        before = dict(together)
        for option in options:
            yield _changed(config, option)
        for option in options:
            yield _changed(config, {**before, **option})
            together |= option
            yield _changed(config, together)
    if _on_gpu(config):
        for factor in RANKS:
            for changes in ({}, together):
                yield _changed(config, changes, factor)


def _same_bits(config: GRPOConfig) -> list[Settings]:
    """Settings that change what is held and nothing that is computed, the cheapest first.

    That they do not is compared in tests/engines/train/test_memory_settings.py.
    """
    train, ranks = config.train, config.cluster.pools[config.cluster.roles.actor].workers
    resharded = train.reshard_after_forward is True
    if train.reshard_after_forward == "auto":
        resharded = ranks > train.replicas
    settings: list[Settings] = [] if resharded else [{"reshard_after_forward": True}]
    if train.gradient_checkpointing < 1:
        settings.append({"gradient_checkpointing": 1.0})
    if _on_gpu(config) and train.optimizer_device == "device":
        settings.append({"optimizer_device": "host"})
    if _on_gpu(config) and train.weights_dtype == "float32" and train.compute_dtype == "bfloat16":
        settings.append({"weights_dtype": "bfloat16"})
    if _on_gpu(config) and not train.activation_offload:
        settings.append({"activation_offload": True})
    return settings


def _other_bits(config: GRPOConfig, shape: Shape) -> list[Settings]:
    """Settings with which sums are made in another order or rounded otherwise."""
    train, ranks = config.train, config.cluster.pools[config.cluster.roles.actor].workers
    longest = config.data.max_prompt_tokens + config.longest_response - 1
    if (episode := episode_tokens(config, shape)) is not None:
        longest = episode
    budgets = [train.micro_batch_tokens // part for part in (2, 4, 8, 16)]
    least = -(-longest // train.sequence_parallel)
    settings: list[Settings] = [
        {"micro_batch_tokens": budget} for budget in budgets if budget >= least
    ]
    if train.logit_chunk_tokens > FEW_LOGITS:
        settings.append({"logit_chunk_tokens": FEW_LOGITS})
    for parts in () if config.sees_frames or not shape.divisible else (2, 4, 8):
        budget = -(-longest // parts)
        helps = parts > train.sequence_parallel and budget < train.micro_batch_tokens
        if helps and not ranks % parts and not shape.heads % parts:
            settings.append({"sequence_parallel": parts, "micro_batch_tokens": budget})
    if train.optimizer_dtype == "float32":
        settings.append({"optimizer_dtype": "bfloat16"})
    if train.optimizer_dtype != "8bit":
        settings.append({"optimizer_dtype": "8bit"})
    return settings


def _on_gpu(config: GRPOConfig) -> bool:
    return config.cluster.pools[config.cluster.roles.actor].gpus > 0


def _changed(config: GRPOConfig, settings: Settings, factor: int = 1) -> tuple[str, GRPOConfig]:
    """With other settings of the train engine and `factor` times as many ranks; in words too."""
    train = config.train.model_copy(update=dict(settings))
    changed = config.model_copy(update={"train": train})
    words = [f"train.{name}={_as_word(value)}" for name, value in settings.items()]
    if factor > 1:
        name = config.cluster.roles.actor
        pool = config.cluster.pools[name]
        more = pool.model_copy(update={"workers": factor * pool.workers})
        pools = {**config.cluster.pools, name: more}
        cluster = config.cluster.model_copy(update={"pools": pools})
        changed = changed.model_copy(update={"cluster": cluster})
        words.append(f"cluster.pools.{name}.workers={more.workers}")
    return " ".join(words), changed


def _as_word(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


class DoesNotFit(ValueError):
    """A place would have to hold more than it can."""

    def __init__(self, sentence: str, place: Place) -> None:
        super().__init__(sentence)
        self.place = place


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLine:
    """A line of a plan."""

    line: str
    place: Place | None = None  # that it sums up


def check_memory(config: GRPOConfig, of_features: tuple[HoldersOf, ...] = ()) -> list[PlanLine]:
    """What the plan says, line by line; ValueError, in one sentence, where it cannot fit.

    DoesNotFit where that is for the place alone.

    of_features: what those of the run add to it.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    # A critic trains all weights, also beside an adapter.
    lora = None if "critic" in config.trained_roles else config.lora
    shape = sizes_of(config.model, longest, config.train.compute_dtype, lora)
    if shape is None:
        why = "the model's files are not here, or its code cannot be gone through for it"
        return [PlanLine(line=f"no plan: {why}")]
    demand = MemoryDemand(config=config, shape=shape, of_features=of_features)
    planned_places = list(places(demand))
    for place in planned_places:
        if not place.fits:
            raise DoesNotFit(too_large(demand, place), place)
    if fault := no_room(demand):
        raise ValueError(fault)
    lines = [_of_ranks(config, ranks) for ranks in demand.ranks()]
    of_workers: list[str] = []
    for engine in demand.worker_engines():
        if engine.line is None:
            of_workers[-1] += f", {_listed(engine.sizes)}"
        else:
            of_workers.append(f"{engine.line}: {_listed(engine.sizes)}")
    lines += of_workers
    lines += [_of_vllm(config, vllm) for vllm in demand.vllms()]
    return [
        *(PlanLine(line=line) for line in lines),
        *(PlanLine(line=_of_place(place), place=place) for place in planned_places),
    ]


def _of_place(place: Place) -> str:
    bound = "" if place.limit is None else f" of {size_of(place.limit)} ({place.limited_by})"
    return f"{place.what}: {size_of(place.planned)}{bound}"


def _of_ranks(config: GRPOConfig, of: Ranks) -> str:
    pool = config.cluster.pools[config.cluster.roles.pool_of(of.role)]
    plan = plan_of(config, of.shape, of.role)
    several = pool.workers > 1 and of.role != "aggregator"
    ranks = f"each of {pool.workers} ranks" if several else "its rank"
    if of.role == "actor" and config.train.engine == "elastic":
        ranks = "each worker"
    stages = ", ".join(f"{stage} {size_of(size)}" for stage, size in plan.stages.items())
    host = f"; on the host {_listed(plan.host)}" if plan.host else ""
    return (
        f"{of.name}, {ranks}: holds {_listed(plan.held)}; in an update {_listed(plan.passing)}; at "
        f"most in {stages}{host}"
    )


def _of_vllm(config: GRPOConfig, vllm: Vllm) -> str:
    """Its share of a GPU, and what that has room for as far as it is known."""
    parts = vllm.settings.tensor_parallel_size
    of = "the GPU" if parts == 1 else f"each of {parts} GPUs"
    begin = f"{vllm.whose}, each engine: {vllm.settings.gpu_memory_utilization:g} of {of}"
    share = vllm.share(gpu_limit(config, vllm.pool)[0])
    if share is None:
        return f"{begin}; what it has room for is not known"
    return (
        f"{begin}, of it weights {size_of(share.weights)}, keys and values "
        f"{size_of(share.keys_and_values)}: {share.tokens:,} tokens, {share.samples:,} samples of "
        f"{share.longest:,} tokens"
    )


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{what} {size_of(size)}" for what, size in sizes.items() if size)
