"""Every method of the catalogue trains the tiny recipe, and its choice is on record.

The methods are read from the settings (method_cases.py), so a new one is tested when it is added.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from configs.algorithm.algorithm import AlgorithmConfig
from configs.grpo import GRPOConfig
from configs.storage import TrackingConfig
from engines.train.contract import LogprobRequest
from storage.runs.commit_log import Commit, commit, read_commit
from storage.runs.run_store import RunStore
from storage.tracking.tracker import TrackedData, TrackedRun, Tracker, flatten
from tests.engines.method_cases import CORRECTIONS, LOSSES, RATIOS, recipes
from tests.engines.method_world import Done, World, scorer_of

RECIPES = {
    name: recipe
    for name, recipe in recipes().items()
    if not AlgorithmConfig.model_validate(recipe).needs_critic
}
STEPS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("methods"), steps=3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> TrackingConfig:
    return TrackingConfig(uri=f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db")


def train(
    world: World, name: str, algorithm: AlgorithmConfig, steps: int, on_policy: bool = False
) -> list[Done]:
    """A few steps from version 0; every figure finite, every step applied, the weights moved."""
    world.reset()
    before = world.actor.digest()
    done = []
    for step in range(1, steps + 1):
        done.append(world.step(name, step, algorithm, on_policy))
        world.assert_finite(done[-1])
        assert done[-1].metrics["train/skipped_steps"] == 0
    assert world.actor.digest() != before
    return done


@pytest.mark.parametrize("name", RECIPES)
def test_a_method_trains_and_is_on_record(
    name: str, world: World, tracking: TrackingConfig
) -> None:
    algorithm = AlgorithmConfig.model_validate(RECIPES[name])
    done = train(world, name, algorithm, STEPS)
    check_commit(RunStore(world.store, name), algorithm, done[0])
    check_page(world, tracking, name, algorithm, done)


def check_commit(files: RunStore, algorithm: AlgorithmConfig, done: Done) -> None:
    """The record of the step gives the algorithm back, so that a replay uses the same one."""
    commit(
        files,
        Commit(
            step=1,
            parent=0,
            algorithm=algorithm.model_dump(mode="json"),
            refs={"batch": done.batch.ref},
            version_in=done.weights,
            version_out=done.weights,
            metrics=done.metrics,
        ),
    )
    record = read_commit(files, 1)
    assert AlgorithmConfig.model_validate(record.algorithm) == algorithm
    assert record.metrics == done.metrics


def check_page(
    world: World, tracking: TrackingConfig, name: str, algorithm: AlgorithmConfig, done: list[Done]
) -> None:
    """MLflow shows every setting of the algorithm and the figures of every step."""
    settings = {"algorithm": algorithm.model_dump(mode="json")}
    tracker = Tracker(tracking)
    tracker.start(
        TrackedRun(
            run=name,
            store_uri=world.store.uri,
            settings=settings,
            data=TrackedData(name="rows", digest="sha256:00", source={}, rows=1),
            model_name="tiny",
        )
    )
    for step, one in enumerate(done, 1):
        tracker.log_step(step, one.metrics, at=1e9 + step)
    tracker.finish()
    from mlflow import MlflowClient

    client = MlflowClient(tracking.uri)
    page = client.get_run(tracker.run_id)
    assert page.data.params == flatten(settings)
    assert page.data.params["algorithm.advantage.kind"] == algorithm.advantage.kind
    assert page.data.metrics["train/loss"] == pytest.approx(done[-1].metrics["train/loss"])


def test_methods_differ(world: World) -> None:
    """The choice reaches the update: different methods give different weights."""
    digests = {}
    for name in ("advantage-rloo", "loss-gspo", "aggregation-token-sum"):
        train(world, f"differ-{name}", AlgorithmConfig.model_validate(RECIPES[name]), 1)
        digests[world.actor.digest()] = name
    assert len(digests) == 3


def test_stored_columns_are_those_of_the_method(world: World) -> None:
    """What a method needs is a column of the batch that trained, so a replay finds it there."""
    wanted = {
        "advantage-remax": {"baseline_reward"},
        "advantage-optimal_token_baseline": {"old_logprobs", "sum_pi_squared"},
        "correction-truncate-token-normalized": {"correction_weights", "correction_kept"},
    }
    for name, columns in wanted.items():
        (done,) = train(world, f"columns-{name}", AlgorithmConfig.model_validate(RECIPES[name]), 1)
        assert columns <= set(done.batch.ref.names), name


def test_squares_of_probabilities_are_those_of_the_whole_table(world: World) -> None:
    """sum_pi_squared, made block by block of the vocabulary, against a plain softmax."""
    import torch

    world.reset()
    part = world.actor.logprobs(
        LogprobRequest(
            batch=world.samples[0],
            column="old_logprobs",
            out_key="methods/squares.safetensors",
            temperature=0.7,
            squared=True,
        )
    )
    assert part.batch is not None
    got, offsets = part.batch.fetch_numpy(world.store, "sum_pi_squared")
    assert offsets is not None
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        world.store.url(world.weights.key).removeprefix("file://")
    )
    data = world.samples[0].fetch(world.store, ["prompt_ids", "response_ids"])
    for row in range(3):
        prompt, response = data["prompt_ids"][row], data["response_ids"][row]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0]
        pi = (logits[len(prompt) - 1 : -1] / 0.7).softmax(-1)
        want = pi.square().sum(-1).numpy()
        np.testing.assert_allclose(got[offsets[row] : offsets[row + 1]], want, rtol=1e-4)


def test_rows_of_one_state_share_its_number(world: World, tmp_path: Path) -> None:
    """data.state_column, from the data set's rows to the column that gigpo compares by."""
    rows = [{"question": f"{n} + 1", "board": {"at": n % 2}} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {
        **world.config.data.model_dump(mode="json"),
        "source": {"kind": "file", "path": str(tmp_path / "rows.jsonl")},
        "state_column": "board",
    }
    config = GRPOConfig.model_validate({**world.config.model_dump(mode="json"), "data": data})
    scorer = scorer_of(config, str(tmp_path / "models"))
    made = scorer.prompts([0, 1, 2, 3], 0, "methods/states.safetensors")
    scorer.close()
    assert made.ref is not None
    numbers = made.ref.fetch_numpy(world.store, "state_id")[0].tolist()
    assert numbers[0] == numbers[2] != numbers[1] == numbers[3]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_every_correction_fits_every_loss(loss: str, world: World) -> None:
    for correction, against in itertools.product(CORRECTIONS, RATIOS):
        recipe = {"correction": [CORRECTIONS[correction]], "loss": LOSSES[loss]}
        algorithm = AlgorithmConfig.model_validate(recipe | {"ratio_against": against})
        train(world, f"{correction}-{loss}-{against}", algorithm, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_method_trains_on_its_own_samples(name: str, world: World) -> None:
    algorithm = AlgorithmConfig.model_validate(RECIPES[name])
    train(world, f"on-policy-{name}", algorithm, 3, on_policy=True)
