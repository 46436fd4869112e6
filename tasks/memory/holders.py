"""What engines hold in memory: a record for each, and those that any run may have.

A feature adds those of its own roles (tasks/run/features.py). The plan of a train rank is
engines/train/memory_plan.py's, that of an engine that samples engines/rollout/memory_plan.py's; here
they are asked with what the run's settings say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from configs.cluster.cluster import Role
from configs.grpo import GRPOConfig
from configs.lora import LoraConfig
from configs.model import Model, PretrainedModel
from configs.rollout import RolloutConfig
from engines.models.checkpoints import present
from engines.models.facts import model_facts
from engines.models.traced_shape import Shape, TracedShape
from engines.rollout.memory_plan import UNPLANNED, VllmShare, engine_bytes, vllm_share
from engines.train.cached_child import BrokeOff
from engines.train.memory_plan import (
    Batch,
    MemoryPlan,
    largest_batch,
    largest_turns,
    plan_aggregator,
    plan_rank,
    plan_worker,
)
from engines.train.traced import traced_shape


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
        return [one for one in self.holders() if isinstance(one, Ranks)]

    def worker_engines(self) -> list[WorkerEngine]:
        """Of all others but vLLM on GPUs."""
        return [one for one in self.holders() if isinstance(one, WorkerEngine)]

    def vllms(self) -> list[Vllm]:
        """On GPUs."""
        return [one for one in self.holders() if isinstance(one, Vllm)]


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
    return engine_bytes(config.rollout, shape, most, longest, _beside(config))


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
