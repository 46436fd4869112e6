"""The memory plan: what each device and this machine will have to hold, before anything starts.

It is put together in this room from what the engines' own plans say (holders.py), and held against
what there is (places.py). A run that cannot fit is refused with the setting that would make it fit
(remedies.py, and vllm_shares.py for a share in which a vLLM cannot start).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.grpo import GRPOConfig
from engines.workers.engine import size_of
from tasks.memory.holders import HoldersOf, MemoryDemand, Ranks, Vllm, plan_of, sizes_of
from tasks.memory.places import Place, gpu_limit, places
from tasks.memory.remedies import too_large
from tasks.memory.vllm_shares import no_room


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
    found = list(places(demand))
    for place in found:
        if not place.fits:
            raise DoesNotFit(too_large(demand, place), place)
    if said := no_room(demand):
        raise ValueError(said)
    lines = [_of_ranks(config, ranks) for ranks in demand.ranks()]
    of_workers: list[str] = []
    for engine in demand.worker_engines():
        if engine.line is None:
            of_workers[-1] += f", {_listed(engine.sizes)}"
        else:
            of_workers.append(f"{engine.line}: {_listed(engine.sizes)}")
    lines += of_workers
    lines += [_of_vllm(config, one) for one in demand.vllms()]
    return [
        *(PlanLine(line=line) for line in lines),
        *(PlanLine(line=_of_place(place), place=place) for place in found),
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
