"""From what the engines of a run are built: settings of the recipe, as each engine takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from configs.distill import DistillConfig
from configs.episodes import EpisodesConfig
from configs.grpo import GRPOConfig
from configs.srpo import SRPOConfig
from configs.teachers import VllmTeaching
from engines.data.data_engine import DataSpec
from engines.data.environment_engine import EnvironmentSpec
from engines.data.reward_model_engine import RewardModelSpec
from engines.encoders.embedding import EncoderSpec
from engines.rollout.contract import RolloutSpec
from engines.teachers.pool import SPARE_WORDS, VllmTeacherSpec
from engines.train.spec import TrainSpec
from engines.trees.contract import TreeSpec
from engines.workers.store_spec import StoreSpec
from storage.objects.store import Store
from storage.runs.adapters import trained_base
from storage.runs.run_store import RunStore
from tasks.run.teachers import Teacher

TrainRole = Literal["actor", "ref", "critic", "teacher"]
MODELS = Path(".refrain/models")


def rollout_spec(config: GRPOConfig, store: Store, name: str = "rollout") -> RolloutSpec:
    """From what a run's rollout engines are built, and the opponent's, which have another name."""
    return RolloutSpec(
        name=name,
        model=config.model,
        model_cache=str(MODELS.absolute()),
        rollout=config.rollout,
        store_uri=store.uri,
        store_options=config.store.options,
        node_cache_bytes=config.store.node_cache_bytes,
        sleeps=config.cluster.share_devices,
        max_model_len=config.longest_sequence,
    )


def vllm_teacher_spec(
    config: DistillConfig, files: RunStore, teacher: Teacher, engine: VllmTeaching
) -> VllmTeacherSpec:
    """From what a teacher in vLLM is built."""
    words = config.algorithm.distillation.top_k + SPARE_WORDS
    own = rollout_spec(config, files.store, teacher.name)
    return VllmTeacherSpec(
        engine=own.model_copy(
            update={
                "model": teacher.model,
                "rollout": engine.engine_of(config.rollout, words),
                "max_model_len": own.max_model_len + 1,  # vLLM draws a token beyond those scored
            }
        ),
        weights=teacher.weights,
        student=config.model,
        run=files.run,
    )


def data_spec(config: GRPOConfig, files: RunStore) -> DataSpec:
    """From what a run's data engines are built."""
    return DataSpec(
        model=config.model,
        model_cache=str(MODELS.absolute()),
        data=config.data,
        rewards=config.rewards,
        run=files.run,
        scorers=config.cluster.pools[config.cluster.roles.reward].workers,
        max_new_tokens=config.rollout.max_new_tokens,
        store_uri=files.store.uri,
        store_options=config.store.options,
        cache_bytes=files.store.cache_bytes,
    )


def store_spec(config: GRPOConfig, store: Store) -> StoreSpec:
    """From what an engine is built that reads and writes batches alone."""
    return StoreSpec(
        store_uri=store.uri, store_options=config.store.options, cache_bytes=store.cache_bytes
    )


def tree_spec(config: GRPOConfig, store: Store) -> TreeSpec:
    """From what the engines are built that have trees grow."""
    return TreeSpec(
        model=config.model,
        model_cache=str(MODELS.absolute()),
        **store_spec(config, store).model_dump(),
    )


def reward_model_spec(config: GRPOConfig, files: RunStore) -> RewardModelSpec:
    """From what a run's reward models and judges are built."""
    return RewardModelSpec(
        model=config.model,
        model_cache=str(MODELS.absolute()),
        data=config.data,
        reward_models=config.rewards.models,
        judges=config.rewards.judges,
        run=files.run,
        max_new_tokens=config.rollout.max_new_tokens,
        store_uri=files.store.uri,
        store_options=config.store.options,
        cache_bytes=files.store.cache_bytes,
    )


def environment_spec(config: GRPOConfig, episodes: EpisodesConfig, store: Store) -> EnvironmentSpec:
    """From what a run's environment engine is built."""
    return EnvironmentSpec(
        model=config.model,
        model_cache=str(MODELS.absolute()),
        data=config.data,
        episodes=episodes,
        frames=config.keeps_frames,
        max_new_tokens=config.rollout.max_new_tokens,
        store_uri=store.uri,
        store_options=config.store.options,
        cache_bytes=store.cache_bytes,
    )


def encoder_spec(config: SRPOConfig, store: Store) -> EncoderSpec:
    """From what a run's encoder is built."""
    return EncoderSpec(
        encoder=config.encoder,
        model_cache=str(MODELS.absolute()),
        store_uri=store.uri,
        store_options=config.store.options,
        cache_bytes=store.cache_bytes,
    )


def train_spec(
    config: GRPOConfig,
    files: RunStore,
    role: TrainRole,
    cache_bytes: int = 0,
    teacher: Teacher | None = None,
    decay_steps: int | None = None,
) -> TrainSpec:
    """From what a run's train engine of a role is built; `teacher`: which one, of that role.

    decay_steps: RL step at which a decaying learning rate ends; None: at `steps`.
    """
    pool, train = config.cluster.roles.pool_of(role), config.train_of(role)
    lora = config.lora if role == "actor" else None
    base = None if lora is None else trained_base(files)
    return TrainSpec(
        model=config.model if teacher is None else teacher.model,
        model_cache=str(MODELS.absolute()),
        train=train,
        lora=lora,
        base=base if teacher is None else teacher.weights,
        name="" if teacher is None else teacher.name,
        student=None if teacher is None else config.model,
        role=role,
        store_uri=files.store.uri,
        store_options=config.store.options,
        cache_bytes=cache_bytes,
        whole_every=config.store.whole_every,
        node_cache_bytes=config.store.node_cache_bytes,
        run=files.run,
        threads=config.cluster.pools[pool].threads,
        seed=config.seed,
        total_steps=(decay_steps or config.steps) * train.epochs * train.mini_batches,
    )
