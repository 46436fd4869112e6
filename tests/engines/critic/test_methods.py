"""Methods with a critic train the tiny recipe, and their choices are on record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.algorithm.algorithm import AlgorithmConfig
from configs.grpo import GRPOConfig
from configs.ppo import PPOConfig
from configs.recipe import load_recipe
from configs.storage import TrackingConfig
from engines.critic.engine import CriticRank
from engines.train.contract import UpdateRequest
from storage.batches.refs import BatchRef
from storage.runs.run_store import RunStore
from tests.engines.method_cases import recipes
from tests.engines.method_world import RUN, World
from tests.engines.test_methods import STEPS, check_commit, check_page, train

RECIPES = {
    name: recipe
    for name, recipe in recipes().items()
    if AlgorithmConfig.model_validate(recipe).needs_critic
}


class WorldOfCritic(World):
    """With a critic beside the policy."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder, steps)
        self.critic = self.engine("critic", CriticRank)
        self.critic.save_state(0)

    def config_of(self, words: list[str]) -> GRPOConfig:
        return load_recipe(PPOConfig, "tiny", [*words, "critic.learning_rate=3e-3"])

    def reset(self) -> None:
        super().reset()
        self.critic.load_state(0)

    def update(self, request: UpdateRequest) -> dict[str, float]:
        metrics = super().update(request)
        if not request.algorithm.needs_critic:
            return metrics
        result = self.critic.update(request)
        assert result.metrics["train/skipped_steps"] == 0
        return metrics | {f"critic/{key}": value for key, value in result.metrics.items()}

    def with_columns(
        self, name: str, step: int, samples: BatchRef, algorithm: AlgorithmConfig
    ) -> BatchRef:
        added = super().with_columns(name, step, samples, algorithm)
        if not algorithm.needs_critic:
            return added
        part = self.critic.values(samples, f"{RUN}/{name}/values-{step}.safetensors")
        assert part.batch is not None
        return added.with_columns(part.batch)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorldOfCritic]:
    made = WorldOfCritic(tmp_path_factory.mktemp("methods"), steps=3)
    yield made
    made.close()


@pytest.mark.parametrize("name", RECIPES)
def test_a_method_trains_and_is_on_record(name: str, world: WorldOfCritic, tmp_path: Path) -> None:
    algorithm = AlgorithmConfig.model_validate(RECIPES[name])
    done = train(world, name, algorithm, STEPS)
    check_commit(RunStore(world.store, name), algorithm, done[0])
    tracking = TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db")
    check_page(world, tracking, name, algorithm, done)


def test_the_critic_decides_the_update(world: WorldOfCritic) -> None:
    digests = set()
    for name in ("advantage-rloo", "advantage-gae"):
        train(world, f"differ-{name}", AlgorithmConfig.model_validate(recipes()[name]), 1)
        digests.add(world.actor.digest())
    assert len(digests) == 2


def test_what_it_is_trained_on_is_in_the_batch(world: WorldOfCritic) -> None:
    """So a replay finds it there."""
    algorithm = AlgorithmConfig.model_validate(RECIPES["advantage-gae"])
    (done,) = train(world, "columns-gae", algorithm, 1)
    assert {"values", "returns"} <= set(done.batch.ref.names)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_method_trains_on_its_own_samples(name: str, world: WorldOfCritic) -> None:
    algorithm = AlgorithmConfig.model_validate(RECIPES[name])
    train(world, f"on-policy-{name}", algorithm, 3, on_policy=True)
