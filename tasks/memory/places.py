"""Where memory is bounded: the GPUs of each pool, and this machine or the workers' jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from configs.grpo import GRPOConfig
from engines.rollout.memory_plan import GIB
from engines.train.resident_memory import LIBRARIES
from tasks.memory.holders import MemoryDemand, plan_of
from tasks.memory.machine_memory import gpu_memory, host_memory


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
    held: dict[str, int] = {}
    host: dict[str, int] = {}
    passing: dict[str, int] = {}
    holes = 0
    for ranks in demand.ranks():
        if pool_of(ranks.role) != name:
            continue
        plan, whose = plan_of(config, ranks.shape, ranks.role), ranks.name
        held.update({f"{whose}'s {what}": size for what, size in plan.held.items() if size})
        host.update({f"{whose}'s {what}": size for what, size in plan.host.items()})
        holes = max(holes, plan.holes)
        if plan.passing_peak >= sum(passing.values()):
            largest = max(plan.passing, key=lambda what: plan.passing[what])
            passing = {f"{whose}'s {largest} and what else an update needs": plan.passing_peak}
    device = {**held, **passing}
    beside: dict[str, int] = {}
    for engine in demand.worker_engines():
        if pool_of(engine.role) == name:
            (device if engine.libraries else beside).update(engine.held)
    if pool.gpus:
        return {**device, **beside}, host
    if device:
        device["holes in the heap and libraries"] = holes + LIBRARIES
    return {}, {**device, **beside}


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


def gpu_limit(config: GRPOConfig, name: str) -> tuple[int | None, str]:
    """Bytes of a GPU of a pool and who says so; None where nobody does."""
    given = config.cluster.pools[name].gpu_memory_gib
    if given is not None:
        return int(given * GIB), f"cluster.pools.{name}.gpu_memory_gib"
    return (gpu_memory() if config.cluster.kind == "local" else None), "nvidia-smi"
