"""What engines hold in memory, a record for each, and the places that have to hold it.

A feature adds those of its own roles (tasks/run/features.py). The plan of a train rank is
engines/train/memory_plan.py's, that of an engine that samples engines/rollout/memory_plan.py's; here
they are asked with what the run's settings say. How much a place has, this machine says and its GPUs.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from configs.cluster import Role
from configs.grpo import GRPOConfig
from configs.lora import LoraConfig
from configs.model import Model, PretrainedModel
from configs.rollout import RolloutConfig
from engines.models.checkpoints import present
from engines.models.facts import model_facts
from engines.models.traced_shape import Shape, TracedShape
from engines.rollout.memory_plan import (
    BYTES,
    GIB,
    UNPLANNED,
    VllmShare,
    engine_bytes,
    transfer_bytes,
    vllm_share,
)
from engines.train.memory_plan import (
    LIBRARIES,
    Batch,
    MemoryPlan,
    largest_batch,
    largest_turns,
    plan_aggregator,
    plan_rank,
    plan_worker,
    with_transfer,
)
from engines.train.model_probes import BrokeOff, traced_shape

CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroups: tuple[Path, ...] = CGROUPS
) -> tuple[int | None, str]:
    """Bytes that processes here may use: the machine's, or its container's where that is less."""
    total: int | None = None
    if meminfo.exists():
        line = next(
            line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal")
        )
        total = int(line.split()[1]) * 1024
    for file in cgroups:
        text = file.read_text().strip() if file.exists() else "max"
        if text.isdigit() and (total is None or int(text) < total):
            return int(text), str(file)
    return total, "its memory"


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU here; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    sizes = [int(line) * 2**20 for line in listing.stdout.split() if line.isdigit()]
    return min(sizes, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """A model of the train engine, on every rank of a role's pool."""

    role: Role
    name: str  # actor, teacher NAME
    shape: Shape
    remedy: str | None = None  # where a pool that is not the actor's cannot hold it


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEngine:
    """What is on each worker of a role's pool and is neither a rank nor a vLLM on GPUs."""

    role: Role
    whose: str  # rollout, teacher NAME, or a judge's label
    sizes: Mapping[str, int]  # bytes, by what they are for
    line: str | None  # how its line in the plan begins; None: it stands in the line before
    by_name: bool = True  # whether a place lists the sizes as `whose`'s
    libraries: bool = False  # whether torch and its heap are counted beside it on a CPU
    remedy: Callable[[str], str]  # of what is largest, what to set

    @property
    def held(self) -> dict[str, int]:
        """Bytes, by what a place calls them."""
        begin = f"{self.whose}'s " if self.by_name else ""
        return {f"{begin}{what}": size for what, size in self.sizes.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vllm:
    """A vLLM on each worker of a pool with GPUs."""

    role: Role
    whose: str  # rollout, opponent, evaluation, teacher NAME, or a judge's label
    pool: str
    settings: RolloutConfig
    named: str  # where these settings are: rollout, teachers.NAME.engine, rewards.functions[]
    shape: Shape | None  # of its model; None: not known here
    longest: int  # tokens of a sample, or of a judge's question and answer
    lora: LoraConfig | None = None  # adapters beside its base
    remedy: str | None = None  # None: its share is that of the engines that sample

    @property
    def holder(self) -> str:
        """What its share of a GPU is called."""
        return "vLLM" if self.whose == "rollout" else f"{self.whose}'s vLLM"

    def share(self, gpu: int | None) -> VllmShare | None:
        """What it has of a GPU with so many bytes; None where that cannot be known."""
        unplanned = any(name in self.settings.engine_args for name in UNPLANNED)
        if isinstance(self.shape, TracedShape):  # of several devices it is not known who has which
            unplanned |= not self.shape.plain_cache or self.settings.tensor_parallel_size > 1
        if gpu is None or self.shape is None or unplanned:
            return None
        return vllm_share(self.settings, self.shape, self.longest, gpu, self.lora)


Holder: TypeAlias = Ranks | WorkerEngine | Vllm
# Those that a feature adds, by the settings and the policy's sizes.
HoldersOf: TypeAlias = Callable[[GRPOConfig, Shape], Iterable[Holder]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryDemand:
    """All that the engines of a run hold."""

    config: GRPOConfig
    shape: Shape  # of the policy
    of_features: tuple[HoldersOf, ...] = ()

    def under(self, config: GRPOConfig) -> MemoryDemand:
        """The same under other settings."""
        return replace(self, config=config)

    def holders(self) -> Iterator[Holder]:
        """Each, in the order in which the plan tells of them."""
        yield from _policy_holders(self.config, self.shape)
        for holders in self.of_features:
            yield from holders(self.config, self.shape)

    def ranks(self) -> list[Ranks]:
        """Of the train engine."""
        return [holder for holder in self.holders() if isinstance(holder, Ranks)]

    def worker_engines(self) -> list[WorkerEngine]:
        """Of all others but vLLM on GPUs."""
        return [holder for holder in self.holders() if isinstance(holder, WorkerEngine)]

    def vllms(self) -> list[Vllm]:
        """On GPUs."""
        return [holder for holder in self.holders() if isinstance(holder, Vllm)]


def _policy_holders(config: GRPOConfig, shape: Shape) -> Iterator[Holder]:
    """Of the roles that have the policy's sizes: what trains, the reference, and what samples."""
    for role in (*config.trained_roles, *config.frozen_roles):
        if role != "teacher":
            yield Ranks(role=role, name=role, shape=shape)
    for role in config.sampling_roles:
        pool = config.cluster.roles.pool_of(role)
        if config.rollout.engine == "vllm" and config.cluster.pools[pool].gpus:
            yield Vllm(
                role=role,
                whose=role,
                pool=pool,
                settings=config.rollout,
                named="rollout",
                shape=shape,
                longest=config.longest_sequence,
                lora=_beside(config),
            )
        else:
            yield WorkerEngine(
                role=role,
                whose=role,
                sizes=rollout_bytes(config, shape, role),
                line=f"{role}, each engine",
                remedy=lambda what: "Set rollout.kv_cache_gib lower.",
            )


def plan_of(config: GRPOConfig, shape: Shape, role: Role) -> MemoryPlan:
    """What each rank of a role takes."""
    train = config.train_of(role)
    pool = config.cluster.pools[config.cluster.roles.pool_of(role)]
    if role == "aggregator":
        return plan_aggregator(shape, train, pool.gpus > 0)
    alone = role == "actor" and train.engine == "elastic"
    ranks = 1 if alone else pool.workers
    batch = _largest_turns(config, shape, ranks) or largest_batch(
        train.micro_batch_tokens,
        config.data.max_prompt_tokens,
        config.longest_response,
        -(-config.trained_per_step // train.mini_batches),
        config.group_size,
        ranks,
        train.sequence_parallel,
        train.tree_training,
        paths=config.most_paths,
        path=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
    )
    lora = config.lora if role == "actor" else None
    gpu = pool.gpus > 0
    plan = plan_rank(shape, train, batch, role=role, ranks=ranks, on_gpu=gpu, lora=lora)
    if role == "actor" and config.rollout.weight_transfer != "store":
        plan = with_transfer(plan, shape, BYTES[config.rollout.dtype], ranks)
    return plan_worker(plan) if alone else plan


def _largest_turns(config: GRPOConfig, shape: Shape, ranks: int) -> Batch | None:
    """The largest micro-batch of a policy that looks at images; None: it does not."""
    episodes, train = config.episodes, config.train
    if not config.sees_frames or shape.vision is None:
        return None
    assert episodes is not None and episodes.max_turn_tokens is not None
    return largest_turns(
        train.micro_batch_tokens,
        config.data.max_prompt_tokens,
        episodes.max_turn_tokens,
        episodes.max_turns,
        shape.vision.patches,
        -(-config.trained_per_step // train.mini_batches),
        ranks,
    )


def episode_tokens(config: GRPOConfig, shape: Shape) -> int | None:
    """What the longest episode of a policy that looks at images reads; None: it does not look."""
    if not config.sees_frames or shape.vision is None:
        return None
    assert config.episodes is not None and config.episodes.max_turn_tokens is not None
    turn = config.data.max_prompt_tokens + shape.vision.patches + config.episodes.max_turn_tokens
    return config.episodes.max_turns * (turn - 1)


def rollout_bytes(config: GRPOConfig, shape: Shape, role: Role = "rollout") -> dict[str, int]:
    """What an engine that samples holds, but for vLLM on GPUs."""
    slots = config.cluster.pools[config.cluster.roles.pool_of(role)].slots
    at_once = min(slots, config.shards_at_once)
    samples = at_once * -(-config.samples_per_step // config.shards_at_once)
    most = min(samples, config.rollout.max_sequences)
    longest = config.longest_sequence
    if config.sees_frames and config.episodes is not None and shape.vision is not None:
        turn = config.episodes.max_turn_tokens or 0
        longest = config.data.max_prompt_tokens + shape.vision.patches + turn
    sizes = engine_bytes(config.rollout, shape, most, longest, _beside(config))
    if role == "rollout" and (size := transfer_bytes(config.rollout, shape)):
        sizes["weight transfer"] = size
    return sizes


def _beside(config: GRPOConfig) -> LoraConfig | None:
    """The adapters that engines load beside their base; None: they have none, or merge them."""
    return config.lora if config.lora is not None and config.lora.serving == "adapter" else None


def sizes_of(
    model: Model, longest: int, products: str = "bfloat16", lora: LoraConfig | None = None
) -> Shape | None:
    """The sizes of a language model of any kind; None where its files do not say them yet.

    A family whose sizes config.json does not say takes a child process of about ten seconds, once.

    longest: tokens of its longest sample. products, lora: where it is trained, their format and the
    adapter that alone is.
    """
    if is_traced(model):
        directory = present(model)
        assert directory is not None
        with contextlib.suppress(BrokeOff):
            # The last token of a sample is not read.
            return traced_shape(directory, longest - 1, products, lora)
        return None
    with contextlib.suppress(ValueError):  # wrong files, of which other checks speak
        facts = model_facts(model)
        return None if facts is None else facts.shape
    return None


def is_traced(model: Model) -> bool:
    """Whether a model's sizes are those that its code makes, not those that config.json says."""
    with contextlib.suppress(ValueError):  # as in sizes_of
        if isinstance(model, PretrainedModel) and present(model) is not None:
            facts = model_facts(model)
            return facts is not None and facts.shape is None and facts.vision is None
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Something with a bound to its memory, and what the plan puts there."""

    what: str  # a GPU of pool gpu; this machine
    limit: int | None  # bytes; None: not known
    limited_by: str  # where the limit is from
    taken: Mapping[str, int]  # bytes by holder

    @property
    def planned(self) -> int:
        """Bytes that it has to hold."""
        return sum(self.taken.values())

    @property
    def largest(self) -> str:
        """What takes the most."""
        return max(self.taken, key=lambda holder: self.taken[holder], default="nothing")

    @property
    def fits(self) -> bool:
        """Whether it can, as far as is known."""
        return self.limit is None or self.planned <= self.limit


def places(demand: MemoryDemand) -> Iterator[Place]:
    """Every GPU of another pool, and the machine or the workers' jobs."""
    config = demand.config
    machine: dict[str, int] = {}  # of this machine, by holder
    for name in sorted(config.used_pools):
        pool = config.cluster.pools[name]
        of_gpu, of_host = _of_worker(demand, name)
        if pool.gpus:
            total, source = gpu_limit(config, name)
            if total is not None:
                for vllm in demand.vllms():
                    if vllm.pool == name:
                        share = vllm.settings.gpu_memory_utilization
                        of_gpu[vllm.holder] = int(share * total)
                        if vllm.role == "rollout" and vllm.shape is not None:
                            size = transfer_bytes(vllm.settings, vllm.shape)
                            of_gpu |= {"vLLM's weight transfer": size} if size else {}
            if config.cluster.share_devices:
                of_gpu, away = _in_turn(of_gpu)
                of_host = {**of_host, **away}
            yield Place(what=f"a GPU of pool {name}", limit=total, limited_by=source, taken=of_gpu)
        if config.cluster.kind == "local":
            for holder, size in of_host.items():
                machine[holder] = machine.get(holder, 0) + size * pool.workers
        elif pool.memory_gib is not None:
            yield Place(
                what=f"a worker of pool {name}",
                limit=int(pool.memory_gib * GIB),
                limited_by=f"cluster.pools.{name}.memory_gib",
                taken=of_host,
            )
    if config.cluster.kind == "local":
        limit, source = host_memory()
        yield Place(what="this machine", limit=limit, limited_by=source, taken=machine)


def _of_worker(demand: MemoryDemand, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """What a worker of a pool takes of its GPU, but for vLLM's share, and of the host, by holder.

    Roles that share a process take turns: of what they need in passing the largest counts.
    """
    config = demand.config
    pool, pool_of = config.cluster.pools[name], config.cluster.roles.pool_of
    sizes: dict[str, int] = {}
    host: dict[str, int] = {}
    passing: dict[str, int] = {}
    holes = 0
    for ranks in demand.ranks():
        if pool_of(ranks.role) != name:
            continue
        plan, whose = plan_of(config, ranks.shape, ranks.role), ranks.name
        sizes.update({f"{whose}'s {what}": size for what, size in plan.held.items() if size})
        host.update({f"{whose}'s {what}": size for what, size in plan.host.items()})
        holes = max(holes, plan.holes)
        if plan.passing_peak >= sum(passing.values()):
            largest = max(plan.passing, key=lambda what: plan.passing[what])
            passing = {f"{whose}'s {largest} and what else an update needs": plan.passing_peak}
    device = {**sizes, **passing}
    beside: dict[str, int] = {}
    for engine in demand.worker_engines():
        if pool_of(engine.role) == name:
            (device if engine.libraries else beside).update(engine.held)
    if pool.gpus:
        return {**device, **beside}, host
    if device:
        device["holes in the heap and libraries"] = holes + LIBRARIES
    return {}, {**device, **beside}


def _in_turn(by_holder: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Of what the roles of a pool take of a GPU one after the other: the most, and the rest.

    The rest is the host's, save of engines that sample: those drop it.
    """
    roles: dict[str, dict[str, int]] = {}
    for what, size in by_holder.items():
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


def gpu_limit(config: GRPOConfig, name: str) -> tuple[int | None, str]:
    """Bytes of a GPU of a pool and who says so; None where nobody does."""
    stated = config.cluster.pools[name].gpu_memory_gib
    if stated is not None:
        return int(stated * GIB), f"cluster.pools.{name}.gpu_memory_gib"
    return (gpu_memory() if config.cluster.kind == "local" else None), "nvidia-smi"
