"""What each role of a run holds in memory, by its settings and its model's shape.

The plan of a train rank is engines/train/memory_plan.py's, that of an engine that samples
engines/rollout/memory_plan.py's; here they are asked with what the run's settings say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from configs.cluster.cluster import Role
from configs.distill import DistillConfig
from configs.grpo import GRPOConfig
from configs.model import Model
from configs.rollout import RolloutConfig
from configs.srpo import SRPOConfig
from configs.teachers import TeacherConfig
from engines.encoders.memory_plan import encoder_bytes
from engines.models.facts import ModelShape, model_facts
from engines.rollout.memory_plan import BYTES, UNPLANNED, VllmShare, engine_bytes, vllm_share
from engines.train.memory_plan import (
    Batch,
    MemoryPlan,
    largest_batch,
    largest_turns,
    plan_aggregator,
    plan_rank,
    plan_worker,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vllm:
    """A vLLM on each worker of a pool with GPUs."""

    whose: str  # rollout, opponent, evaluation, teacher NAME, or a judge's label
    pool: str
    settings: RolloutConfig
    named: str  # where these settings are: rollout, teachers.NAME.engine, rewards.functions[]
    shape: ModelShape | None  # of its model; None: not known here
    longest: int  # tokens of a sample, or of a judge's question and answer

    @property
    def holder(self) -> str:
        """What its share of a GPU is called."""
        return "vLLM" if self.whose == "rollout" else f"{self.whose}'s vLLM"

    def share(self, gpu: int | None) -> VllmShare | None:
        """What it has of a GPU with so many bytes; None where that cannot be known."""
        unplanned = any(name in self.settings.engine_args for name in UNPLANNED)
        if gpu is None or self.shape is None or unplanned:
            return None
        return vllm_share(self.settings, self.shape, self.longest, gpu)


def train_roles(config: GRPOConfig, shape: ModelShape) -> Iterator[tuple[Role, str, ModelShape]]:
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


def plan_of(config: GRPOConfig, shape: ModelShape, role: Role) -> MemoryPlan:
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


def _largest_turns(config: GRPOConfig, shape: ModelShape, ranks: int) -> Batch | None:
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


def episode_tokens(config: GRPOConfig, shape: ModelShape) -> int | None:
    """What the longest episode of a policy that looks at images reads; None: it does not look."""
    if not config.sees_frames or shape.vision is None:
        return None
    assert config.episodes is not None and config.episodes.max_turn_tokens is not None
    turn = config.data.max_prompt_tokens + shape.vision.patches + config.episodes.max_turn_tokens
    return config.episodes.max_turns * (turn - 1)


def rollout_bytes(config: GRPOConfig, shape: ModelShape, role: Role = "rollout") -> dict[str, int]:
    """What an engine that samples holds, but for vLLM on GPUs."""
    slots = config.cluster.pools[config.cluster.roles.pool_of(role)].slots
    at_once = min(slots, config.shards_at_once)
    samples = at_once * -(-config.samples_per_step // config.shards_at_once)
    most = min(samples, config.rollout.max_sequences)
    longest = config.longest_sequence
    if config.sees_frames and config.episodes is not None and shape.vision is not None:
        turn = config.episodes.max_turn_tokens or 0
        longest = config.data.max_prompt_tokens + shape.vision.patches + turn
    return engine_bytes(config.rollout, shape, most, longest)


def vllms(config: GRPOConfig, shape: ModelShape) -> Iterator[Vllm]:
    """Every vLLM on GPUs: of what samples, of teachers, and of judges."""
    pool_of, pools = config.cluster.roles.pool_of, config.cluster.pools
    for role in config.sampling_roles if config.rollout.engine == "vllm" else ():
        if pools[pool_of(role)].gpus:
            yield Vllm(
                whose=role,
                pool=pool_of(role),
                settings=config.rollout,
                named="rollout",
                shape=shape,
                longest=config.longest_sequence,
            )
    teaching = config.vllm_teachers if isinstance(config, DistillConfig) else {}
    for name, engine in teaching.items() if teaching and pools[pool_of("teacher")].gpus else ():
        assert isinstance(config, DistillConfig)
        yield Vllm(
            whose=f"teacher {name}",
            pool=pool_of("teacher"),
            settings=engine.engine_of(config.rollout, 0),
            named=f"teachers.{name}.engine",
            shape=_shape_of_teacher(config.teachers[name], shape),
            longest=config.longest_sequence,
        )
    pool = pool_of("reward_model")
    for judge in config.rewards.judges if pools[pool].gpus else ():
        if judge.engine == "vllm":
            yield Vllm(
                whose=judge.label,
                pool=pool,
                settings=judge.rollout,
                named="rewards.functions[]",
                shape=_shape_of(judge.checkpoint),
                longest=judge.max_length,
            )


def judge_bytes(config: GRPOConfig) -> dict[str, int]:
    """What the judges on a worker hold, but for those in a vLLM on GPUs."""
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
    """What each teacher in vLLM holds, by its name, but on GPUs; those whose sizes are known here."""
    if not isinstance(config, DistillConfig) or not config.vllm_teachers:
        return
    if config.cluster.pools[config.cluster.roles.pool_of("teacher")].gpus:
        return
    for name, engine in config.vllm_teachers.items():
        own = _shape_of_teacher(config.teachers[name], shape)
        if own is not None:
            settings, most = engine.engine_of(config.rollout, 0), engine.max_sequences
            yield f"teacher {name}", engine_bytes(settings, own, most, config.longest_sequence)


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


def seeing_bytes(config: GRPOConfig) -> dict[str, int]:
    """What the encoder of episodes takes; {} where there is none, or its files are not here."""
    return encoder_bytes(config.encoder) if isinstance(config, SRPOConfig) else {}


def _shape_of_teacher(teacher: TeacherConfig, shape: ModelShape) -> ModelShape | None:
    return shape if teacher.model is None else _shape_of(teacher.model)


def _shape_of(model: Model) -> ModelShape | None:
    """The sizes of a model beside the policy; None where its files are not here, or are wrong."""
    with contextlib.suppress(ValueError):  # which is said where rewards are checked
        facts = model_facts(model)
        return None if facts is None else facts.shape
    return None
