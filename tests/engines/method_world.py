"""The engines of a tiny run in one process, driven as the flows drive them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from configs.algorithm.algorithm import AlgorithmConfig
from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from engines.data.contract import AdvantagesRequest, AdvantagesResult, DataSpec, ScoreRequest
from engines.data.data_engine import DataEngine
from engines.rewards.protocol import TrainerState
from engines.rollout.contract import RolloutRequest, RolloutSpec, Sampling
from engines.rollout.hf_engine import HFEngine
from engines.train.contract import LogprobRequest, TrainSpec, UpdateRequest
from engines.train.fsdp_engine import FSDPEngine
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef

E = TypeVar("E", bound=FSDPEngine)

RUN = "methods"
# Two optimizer steps a batch, so that a ratio leaves 1; steps so large that it goes far.
SETTINGS = ["train.mini_batches=2", "train.micro_batch_tokens=256"]


@dataclass(frozen=True)
class Done:
    """One RL step."""

    batch: AdvantagesResult
    metrics: dict[str, float]
    weights: WeightsRef  # that sampled


def scorer_of(config: GRPOConfig, models: str) -> DataEngine:
    """The engine of a cpu worker, in this process."""
    return DataEngine(
        DataSpec(
            run="methods",
            model=config.model,
            model_cache=models,
            data=config.data,
            rewards=config.rewards,
            max_new_tokens=config.rollout.max_new_tokens,
            store_uri=config.store.uri,
            store_options={},
        )
    )


class World:
    """Prompts, rollouts and rewards of a few steps, and engines that go back to version 0."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.config = self.config_of([*SETTINGS, f"store.uri=file://{folder}/store"])
        self.store = Store(self.config.store.uri)
        self.files = RunStore(self.store, RUN)
        self.models = models = str(folder / "models")
        config, uri = self.config, self.config.store.uri
        self.scorer = scorer_of(config, models)
        self.rollout = HFEngine(
            RolloutSpec(
                model=config.model,
                model_cache=models,
                rollout=config.rollout,
                store_uri=uri,
                max_model_len=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
            )
        )
        self.made: list[FSDPEngine] = []
        self.actor = self.engine("actor", FSDPEngine)
        self.reference = self.engine("ref", FSDPEngine)
        self.actor.save_state(0)
        self.weights = self.actor.export_weights(0, "float32")
        self.actor.settle_weights(0, "float32")
        self.rollout.sync(self.weights)
        self.prompts = [self._prompts(step) for step in range(1, steps + 1)]
        self.samples = [self.sampled(step) for step in range(1, steps + 1)]
        self.greedy = [self.sampled(step, greedy=True) for step in range(1, steps + 1)]

    def config_of(self, words: list[str]) -> GRPOConfig:
        """The settings."""
        return load_recipe(GRPOConfig, "tiny", words)

    def engine(self, role: Any, kind: type[E]) -> E:
        """The only rank of a role."""
        engine = kind(
            TrainSpec(
                model=self.config.model,
                model_cache=self.models,
                train=self.config.train_of(role),
                role=role,
                store_uri=self.config.store.uri,
                run=RUN,
                total_steps=64,
            )
        )
        engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)
        self.made.append(engine)
        return engine

    def _prompts(self, step: int) -> BatchRef:
        count = self.config.prompts_per_step
        first = (step - 1) * count
        made = self.scorer.prompts(
            list(range(first, first + count)), first, f"{RUN}/prompts-{step}.safetensors"
        )
        assert made.ref is not None
        return made.ref

    def sampled(self, step: int, greedy: bool = False, name: str = "all") -> BatchRef:
        """Scored samples of a step under the weights that the rollout engine holds."""
        prompts = self.prompts[step - 1]
        sampling = Sampling.of(self.config.rollout, self.config.group_size)
        if greedy:
            sampling = sampling.as_greedy
        stem = f"{RUN}/{name}/{'greedy' if greedy else 'samples'}-{step}"
        found = self.rollout.generate(
            RolloutRequest(
                prompts=prompts,
                sampling=sampling,
                out_key=f"{stem}.safetensors",
                step=step,
                shard=1,
            )
        ).ref
        state = TrainerState(global_step=step - 1, max_steps=len(self.prompts))
        request = ScoreRequest(prompts=prompts, samples=found, trainer_state=state)
        scored = self.scorer.score(request, f"{stem}-scores.safetensors")
        assert scored.failed == 0
        return found.drop(["status"]).with_columns(scored.ref)

    def reset(self) -> None:
        """What is trained at version 0, and the rollout engine too."""
        self.actor.load_state(0)
        if self.rollout.version != 0:
            self.rollout.sync(self.weights)

    def step(
        self, name: str, step: int, algorithm: AlgorithmConfig, on_policy: bool = False
    ) -> Done:
        """One RL step as the flows do it; without `on_policy` the samples are version 0's."""
        weights = self.weights
        samples, greedy = self.samples[step - 1], self.greedy[step - 1]
        if on_policy and step > 1:
            weights = self.actor.export_weights(step - 1, "float32")
            self.rollout.sync(weights)
            samples = self.sampled(step, name=name)
            greedy = self.sampled(step, greedy=True, name=name)
        samples = self.with_columns(name, step, samples, algorithm)
        wanted = AdvantagesRequest(
            samples=samples,
            algorithm=algorithm,
            version=step - 1,
            baselines=greedy if algorithm.needs_baselines else None,
        )
        batch = self.scorer.advantages(wanted, f"{RUN}/{name}/advantages-{step}.safetensors")
        request = UpdateRequest(
            step=step,
            batch=batch.ref,
            algorithm=algorithm,
            temperature=self.config.rollout.temperature,
            max_new_tokens=self.config.rollout.max_new_tokens,
        )
        metrics = dict(batch.metrics)
        metrics |= self.update(request)
        if on_policy:
            # A version is published once; the next case publishes its own.
            self.store.delete(self.store.list(f"{RUN}/weights/v{step - 1:06d}") if step > 1 else [])
        return Done(batch=batch, metrics=metrics, weights=weights)

    def update(self, request: UpdateRequest) -> dict[str, float]:
        """Of all that is trained; metrics."""
        return dict(self.actor.update(request).metrics)

    def with_columns(
        self, name: str, step: int, samples: BatchRef, algorithm: AlgorithmConfig
    ) -> BatchRef:
        """The columns that the train engines add before the advantages."""
        temperature = self.config.rollout.temperature
        sources = [(self.actor, "old_logprobs", algorithm.needs_squares)]
        if algorithm.needs_reference:
            sources.append((self.reference, "ref_logprobs", False))
        added = samples
        for engine, column, squared in sources:
            key = f"{RUN}/{name}/{column}-{step}.safetensors"
            part = engine.logprobs(
                LogprobRequest(
                    batch=samples,
                    column=column,
                    out_key=key,
                    temperature=temperature,
                    squared=squared,
                )
            )
            assert part.batch is not None
            added = added.with_columns(part.batch)
        return added

    def assert_finite(self, done: Done) -> None:
        """Every figure and every number that the update read."""
        bad = {name: value for name, value in done.metrics.items() if not math.isfinite(value)}
        assert not bad
        for name in done.batch.ref.names:
            kind = done.batch.ref.column(name).dtype
            if kind == "F32" and not name.startswith("score/"):
                values, _ = done.batch.ref.fetch_numpy(self.store, name)
                assert np.isfinite(values).all(), name

    def close(self) -> None:
        for engine in (self.scorer, self.rollout, *self.made):
            engine.close()
