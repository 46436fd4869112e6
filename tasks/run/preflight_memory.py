"""The memory plan: what each device and this machine will have to hold, before anything starts.

The train engines' part is engines/train/memory_plan.py's; here it is put together with the rollout
engines', and held against what there is. A run that cannot fit is refused with the setting that
would make it fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from configs.cluster.cluster import Role
from configs.distill import DistillConfig
from configs.grpo import GRPOConfig
from configs.model import Model
from configs.rollout import RolloutConfig
from configs.teachers import TeacherConfig
from engines.model_facts import ModelShape, model_facts
from engines.train.memory_plan import (
    MemoryPlan,
    largest_batch,
    plan_aggregator,
    plan_rank,
    plan_worker,
    resident_bytes,
)
from engines.workers.machine_memory import gpu_memory, host_memory
from engines.workers.out_of_memory import GIB, size_of

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Something with a bound to its memory, and what the plan puts there."""

    what: str  # a GPU of pool gpu; this machine
    limit: int | None  # bytes; None: not known
    planned: int  # bytes
    largest: str  # what takes the most
    limited_by: str  # where the limit is from


def check_memory(config: GRPOConfig) -> list[str]:
    """What the plan says, line by line; ValueError, in one sentence, where it cannot fit."""
    facts = model_facts(config.model)
    shape = None if facts is None else facts.shape
    if shape is None:
        return ["no plan: the model's files do not say its sizes, or not as Llama's do"]
    places = list(_places(config, shape))
    for place in places:
        if place.limit is not None and place.planned > place.limit:
            raise ValueError(_refusal(config, shape, place))
    lines = [_of_role(config, of, role, name) for role, name, of in _held(config, shape)]
    lines += [_of_rollout(config, shape, role) for role in config.sampling_roles]
    lines += [
        f"{name}, each engine: {_listed(taken)}" for name, taken in teacher_bytes(config, shape)
    ]
    if taken := {**reward_model_bytes(config), **judge_bytes(config)}:
        lines.append(f"reward_model, each worker: {_listed(taken)}")
    for place in places:
        bound = "" if place.limit is None else f" of {size_of(place.limit)} ({place.limited_by})"
        lines.append(f"{place.what}: {size_of(place.planned)}{bound}")
    return lines


def _held(config: GRPOConfig, shape: ModelShape) -> Iterator[tuple[Role, str, ModelShape]]:
    """Roles of the train engine, what their models are called, and the sizes of these.

    Of several teachers each. One whose sizes are not known here is not counted; one that is a policy
    version has the model's.
    """
    for role in (*config.trained_roles, *config.frozen_roles):
        if role != "teacher":
            yield role, role, shape
    if config.train.engine == "elastic":  # any worker of its pool may be it
        yield "aggregator", "aggregator", shape
    if isinstance(config, DistillConfig) and not config.vllm_teachers:
        for name in config.own_teachers:
            if (own := _shape_of_teacher(config.teachers[name], shape)) is not None:
                yield "teacher", f"teacher {name}", own


def _shape_of_teacher(teacher: TeacherConfig, shape: ModelShape) -> ModelShape | None:
    return shape if teacher.model is None else _shape_of(teacher.model)


def plan_of(config: GRPOConfig, shape: ModelShape, role: Role) -> MemoryPlan:
    """What each rank of a role takes."""
    train = config.train_of(role)
    pool = config.cluster.pools[config.cluster.roles.pool_of(role)]
    if role == "aggregator":
        return plan_aggregator(shape, train, pool.gpus > 0)
    alone = role == "actor" and train.engine == "elastic"
    ranks = 1 if alone else pool.workers
    batch = largest_batch(
        train.micro_batch_tokens,
        config.data.max_prompt_tokens,
        config.rollout.max_new_tokens,
        -(-config.trained_per_step // train.mini_batches),
        config.group_size,
        ranks,
        train.sequence_parallel,
        train.tree_training,
    )
    lora = config.lora if role == "actor" else None
    gpu = pool.gpus > 0
    plan = plan_rank(shape, train, batch, role=role, ranks=ranks, on_gpu=gpu, lora=lora)
    return plan_worker(plan) if alone else plan


def rollout_bytes(config: GRPOConfig, shape: ModelShape, role: Role = "rollout") -> dict[str, int]:
    """What an engine that samples holds; on a GPU all of vLLM's share is called keys and values."""
    rollout = config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    slots = config.cluster.pools[config.cluster.roles.pool_of(role)].slots
    at_once = min(slots, config.shards_at_once)
    samples = at_once * -(-config.samples_per_step // config.shards_at_once)
    return engine_bytes(rollout, shape, min(samples, rollout.max_sequences), longest)


def engine_bytes(
    rollout: RolloutConfig, shape: ModelShape, samples: int, longest: int
) -> dict[str, int]:
    """The same of any such engine, with so many samples at once of at most so many tokens."""
    tables = 2 * shape.vocabulary * shape.hidden  # the head is a weight of its own
    inside = shape.parameters - (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    weights = BYTES[rollout.dtype] * (inside + tables) // rollout.tensor_parallel_size
    if rollout.engine == "vllm":
        return {"weights": weights, "keys and values": int(rollout.kv_cache_gib * GIB)}
    longest = 1 << (longest - 1).bit_length()  # a row's room is doubled as it grows
    token = 2 * shape.layers * shape.kv_heads * shape.head_size * BYTES[rollout.dtype]
    return {"weights": weights, "keys and values": samples * longest * token}


def judge_bytes(config: GRPOConfig) -> dict[str, int]:
    """What the judges on a worker hold, but for those whose share of a GPU vLLM takes."""
    on_gpu = config.cluster.pools[config.cluster.roles.pool_of("reward_model")].gpus > 0
    found: dict[str, int] = {}
    for judge in config.rewards.judges:
        shape = _shape_of(judge.checkpoint)
        if shape is None or (on_gpu and judge.engine == "vllm"):
            continue
        taken = engine_bytes(judge.rollout, shape, judge.max_sequences, judge.max_length)
        found.update({f"{judge.label}'s {what}": size for what, size in taken.items()})
    return found


def teacher_bytes(config: GRPOConfig, shape: ModelShape) -> Iterator[tuple[str, dict[str, int]]]:
    """What each teacher in vLLM holds, by its name; those whose sizes are known here."""
    if not isinstance(config, DistillConfig):
        return
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    for name, engine in config.vllm_teachers.items():
        own = _shape_of_teacher(config.teachers[name], shape)
        if own is not None:
            settings = engine.engine_of(config.rollout, 0)
            yield f"teacher {name}", engine_bytes(settings, own, engine.max_sequences, longest)


def _shape_of(model: Model) -> ModelShape | None:
    """The sizes of a model beside the policy; None where its files are not here, or are wrong."""
    with contextlib.suppress(ValueError):  # which is said where rewards are checked
        facts = model_facts(model)
        return None if facts is None else facts.shape
    return None


def reward_model_bytes(config: GRPOConfig) -> dict[str, int]:
    """What the reward models hold, and a batch of the largest needs; {} where no files are here.

    A batch goes through one layer after the other, and keeps nothing: the widest is the feed-forward
    part, with its two inputs, their product, and the residual stream on the way.
    """
    weights, batches = 0, [0]
    for reward in config.rewards.models:
        shape, size = _shape_of(reward.checkpoint), BYTES[reward.dtype]
        if shape is None:
            continue
        inside = shape.layers * shape.layer_parameters + (shape.vocabulary + 2) * shape.hidden
        weights += size * inside
        tokens = min(reward.batch_tokens, config.samples_per_step * reward.max_length)
        batches.append(size * tokens * (3 * shape.intermediate + 2 * shape.hidden))
    if not weights:
        return {}
    return {"reward models' weights": weights, "reward models' batch": max(batches)}


def _of_role(config: GRPOConfig, shape: ModelShape, role: Role, name: str) -> str:
    pool = config.cluster.pools[config.cluster.roles.pool_of(role)]
    plan = plan_of(config, shape, role)
    several = pool.workers > 1 and role != "aggregator"
    ranks = f"each of {pool.workers} ranks" if several else "its rank"
    if role == "actor" and config.train.engine == "elastic":
        ranks = "each worker"
    stages = ", ".join(f"{stage} {size_of(size)}" for stage, size in plan.stages.items())
    host = f"; on the host {_listed(plan.host)}" if plan.host else ""
    return (
        f"{name}, {ranks}: holds {_listed(plan.held)}; in an update {_listed(plan.passing)}; at "
        f"most in {stages}{host}"
    )


def _of_rollout(config: GRPOConfig, shape: ModelShape, role: Role) -> str:
    pool = config.cluster.pools[config.cluster.roles.pool_of(role)]
    taken = rollout_bytes(config, shape, role)
    if pool.gpus and config.rollout.engine == "vllm":
        share = f"{config.rollout.gpu_memory_utilization:g} of the GPU"
        return f"{role}, each engine: {share}, of it weights {size_of(taken['weights'])}"
    return f"{role}, each engine: {_listed(taken)}"


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{what} {size_of(size)}" for what, size in sizes.items() if size)


def _places(config: GRPOConfig, shape: ModelShape) -> Iterator[Place]:
    """Every GPU of another pool, and the machine or the workers' jobs."""
    machine: dict[str, int] = {}  # of this machine, by holder
    for name in sorted(config.used_pools):
        pool = config.cluster.pools[name]
        of_gpu, of_host = _of_worker(config, shape, name)
        if pool.gpus:
            total, source = _gpu_limit(config, name)
            for role in config.sampling_roles if config.rollout.engine == "vllm" else ():
                if total is not None and name == config.cluster.roles.pool_of(role):
                    holder = "vLLM" if role == "rollout" else f"{role}'s vLLM"
                    of_gpu[holder] = int(config.rollout.gpu_memory_utilization * total)
            if total is not None and name == config.cluster.roles.pool_of("reward_model"):
                for judge in config.rewards.judges:
                    if judge.engine == "vllm":
                        of_gpu[f"{judge.label}'s vLLM"] = int(judge.gpu_memory_utilization * total)
            if total is not None and name == config.cluster.roles.pool_of("teacher"):
                for teacher, share in _shares_of_teachers(config).items():
                    of_gpu[f"teacher {teacher}'s vLLM"] = int(share * total)
            if config.cluster.share_devices:
                of_gpu, away = _in_turn(of_gpu)
                of_host = {**of_host, **away}
            yield _place(f"a GPU of pool {name}", total, of_gpu, source)
        if config.cluster.kind == "local":
            for holder, size in of_host.items():
                machine[holder] = machine.get(holder, 0) + size * pool.workers
        elif pool.memory_gib is not None:
            given, key = int(pool.memory_gib * GIB), f"cluster.pools.{name}.memory_gib"
            yield _place(f"a worker of pool {name}", given, of_host, key)
    if config.cluster.kind == "local":
        limit, source = host_memory()
        yield _place("this machine", limit, machine, source)


def _shares_of_teachers(config: GRPOConfig) -> dict[str, float]:
    """Of a GPU's memory, by the names of teachers in vLLM."""
    found = config.vllm_teachers if isinstance(config, DistillConfig) else {}
    return {name: engine.gpu_memory_utilization for name, engine in found.items()}


def _in_turn(taken: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Of what the roles of a pool take of a GPU one after the other: the most, and the rest.

    The rest is the host's, save of engines that sample: those drop it.
    """
    roles: dict[str, dict[str, int]] = {}
    for what, size in taken.items():
        roles.setdefault("rollout" if what == "vLLM" else what.split("'s ")[0], {})[what] = size
    most = max(roles, key=lambda role: sum(roles[role].values()), default="")
    away = {
        f"{what} (while others have the GPU)": size
        for role, sizes in roles.items()
        if role != "rollout"
        for what, size in sizes.items()
        if "what else an update needs" not in what
    }
    return roles.get(most, {}), away


def _gpu_limit(config: GRPOConfig, name: str) -> tuple[int | None, str]:
    """Bytes of a GPU of a pool and who says so; None where nobody does."""
    given = config.cluster.pools[name].gpu_memory_gib
    if given is not None:
        return int(given * GIB), f"cluster.pools.{name}.gpu_memory_gib"
    return (gpu_memory() if config.cluster.kind == "local" else None), "nvidia-smi"


def _place(what: str, limit: int | None, taken: dict[str, int], source: str) -> Place:
    largest = max(taken, key=lambda holder: taken[holder], default="nothing")
    size = sum(taken.values())
    return Place(what=what, limit=limit, planned=size, largest=largest, limited_by=source)


def _of_worker(
    config: GRPOConfig, shape: ModelShape, name: str
) -> tuple[dict[str, int], dict[str, int]]:
    """What a worker of a pool takes of its GPU and of the host, by holder.

    Roles that share a process take turns: of what they need in passing the largest counts.
    """
    roles = config.cluster.roles
    pool = config.cluster.pools[name]
    held: dict[str, int] = {}
    host: dict[str, int] = {}
    passing: dict[str, int] = {}
    for role, whose, own in _held(config, shape):
        if roles.pool_of(role) != name:
            continue
        plan = plan_of(config, own, role)
        held.update({f"{whose}'s {what}": size for what, size in plan.held.items() if size})
        host.update({f"{whose}'s {what}": size for what, size in plan.host.items()})
        if plan.passing_peak >= sum(passing.values()):
            largest = max(plan.passing, key=lambda what: plan.passing[what])
            passing = {f"{whose}'s {largest} and what else an update needs": plan.passing_peak}
    sampling: dict[str, int] = {}
    for role in config.sampling_roles:
        if name == roles.pool_of(role) and not (pool.gpus and config.rollout.engine == "vllm"):
            taken = rollout_bytes(config, shape, role)
            sampling |= {f"{role}'s {what}": size for what, size in taken.items()}
    if name == roles.pool_of("teacher") and not pool.gpus:
        for teacher, taken in teacher_bytes(config, shape):
            sampling |= {f"{teacher}'s {what}": size for what, size in taken.items()}
    device = {**held, **passing}
    if config.rewards.on_engines and name == roles.pool_of("reward_model"):
        device.update(reward_model_bytes(config))
    if pool.gpus:
        return {**device, **sampling}, host
    if device:
        used = sum(device.values())
        device["holes in the heap and libraries"] = resident_bytes(used) - used
    return {}, {**device, **sampling}


def _refusal(config: GRPOConfig, shape: ModelShape, place: Place) -> str:
    limit = place.limit
    assert limit is not None
    said = (
        f"By the memory plan {place.what} has to hold {size_of(place.planned)}, and has "
        f"{size_of(limit)} ({place.limited_by}); most of it for {place.largest}."
    )
    if place.largest in ("vLLM", "opponent's vLLM", "evaluation's vLLM"):
        return f"{said} Set rollout.gpu_memory_utilization lower{_or_apart(config)}."
    if place.largest.startswith(("rollout", "opponent", "evaluation")):
        return f"{said} Set rollout.kv_cache_gib lower."
    if place.largest == "reward models' batch":
        return f"{said} Set batch_tokens of the reward model (rewards.functions[]) lower."
    if any(place.largest.startswith(f"{judge.label}'s ") for judge in config.rewards.judges):
        return (
            f"{said} Set kv_cache_gib of the judge (rewards.functions[]), on a GPU "
            "gpu_memory_utilization, lower."
        )
    for teacher in _shares_of_teachers(config):
        if place.largest.startswith(f"teacher {teacher}'s "):
            where = f"teachers.{teacher}.engine"
            return f"{said} Set {where}.kv_cache_gib, on a GPU gpu_memory_utilization, lower."
    if place.largest == "reward models' weights":
        return f"{said} Set cluster.roles.reward_model to a larger pool, or take a smaller model."
    pool_of = config.cluster.roles.pool_of
    own = "teacher" in config.frozen_roles and pool_of("teacher") != pool_of("actor")
    if own and place.what.endswith(f" of pool {pool_of('teacher')}"):
        return f"{said} Set cluster.roles.teacher to a pool with more workers."
    for words, changed in _smaller(config):
        now = next(one for one in _places(changed, shape) if one.what == place.what)
        if now.planned <= limit:
            return f"{said} Set {words}: then it is {size_of(now.planned)}."
    return f"{said} No setting of the train engine is enough. Choose a smaller model."


def _or_apart(config: GRPOConfig) -> str:
    """What else helps where the opponent's engines are on the devices of the policy's."""
    roles = config.cluster.roles
    beside = config.opponent is not None and roles.pool_of("opponent") == roles.rollout
    return ", or cluster.roles.opponent to a pool of its own" if beside else ""


def _smaller(config: GRPOConfig) -> Iterator[tuple[str, GRPOConfig]]:
    """Settings with which less memory is taken: one alone, several, and then more ranks."""
    train = config.train
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens - 1
    pool = config.cluster.roles.pool_of("actor")
    on_gpu = config.cluster.pools[pool].gpus > 0
    budgets = [train.micro_batch_tokens // part for part in (2, 4, 8, 16)]
    options: list[dict[str, object]] = [{"gradient_checkpointing": 1.0}]
    options += [{"micro_batch_tokens": budget} for budget in budgets if budget >= longest]
    options += [{"optimizer_device": "host"}] if on_gpu else []
    options += [{"optimizer_dtype": "bfloat16"}]
    for option in options:
        yield _changed(config, option, 1)
    together: dict[str, object] = {}
    for option in options:
        together |= option
        yield _changed(config, together, 1)
    if on_gpu:
        for changes in ({}, together):
            for factor in (2, 4, 8, 16, 32, 64):
                yield _changed(config, changes, factor)


def _changed(
    config: GRPOConfig, settings: Mapping[str, object], factor: int
) -> tuple[str, GRPOConfig]:
    """With other settings of the train engine and `factor` times as many ranks; in words too."""
    train = config.train.model_copy(update=dict(settings))
    changed = config.model_copy(update={"train": train})
    words = [
        f"train.{name}={value:g}" if isinstance(value, float) else f"train.{name}={value}"
        for name, value in settings.items()
    ]
    if factor > 1:
        name = config.cluster.roles.pool_of("actor")
        pool = config.cluster.pools[name]
        more = pool.model_copy(update={"workers": factor * pool.workers})
        pools = {**config.cluster.pools, name: more}
        cluster = config.cluster.model_copy(update={"pools": pools})
        changed = changed.model_copy(update={"cluster": cluster})
        words.append(f"cluster.pools.{name}.workers={more.workers}")
    return " ".join(words), changed
