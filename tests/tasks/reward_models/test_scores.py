"""A reward task with a reward model beside a function: engines, stored columns, identity, failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from configs.rewards import Pairwise
from engines.data.contract import DataSpec, Scorer
from engines.data.data_engine import DataEngine
from engines.models.checkpoints import load_tokenizer, materialize
from engines.reward_models.contract import RewardModelSpec
from engines.reward_models.engine import RewardModelEngine
from engines.rewards.runner import code_digest
from engines.workers.engine import callable_methods
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.prompts.cursor import Cursor
from storage.runs.run_store import RunStore
from tasks import reward
from tasks.reward_models.role import REWARD_MODEL
from tasks.reward_models.scores import model_scores
from tasks.run import stage
from tasks.run.features import ScoredFirst
from tasks.run.roles import SCORER
from tests.engines.reward_models.drawn import draw_reward_model

SAMPLES = 4  # two of each of two prompts
DIGITS = "{kind: function, path: 'engines.rewards.builtin:share_of_digits', weight: 2.0}"


@pytest.fixture
def config(tmp_path: Path) -> GRPOConfig:
    model = draw_reward_model(tmp_path / "models")
    learned = (
        f"{{kind: reward_model, model: {model}, dtype: float32, max_length: 200, weight: 0.5}}"
    )
    return load_recipe(
        GRPOConfig,
        "tiny",
        [f"store.uri=file://{tmp_path}/store", f"rewards.functions=[{learned}, {DIGITS}]"],
    )


@pytest.fixture
def run(config: GRPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """A run whose engines are in this process."""
    common: dict[str, Any] = {
        "model": config.model,
        "model_cache": str(tmp_path / "models"),
        "data": config.data,
        "max_new_tokens": 16,
        "store_uri": config.store.uri,
        "store_options": {},
    }
    scorer = DataEngine(DataSpec(run="r", rewards=config.rewards, **common))
    models = RewardModelEngine(RewardModelSpec(reward_models=config.rewards.models, **common))
    found = Mock(config=config, store=Store(config.store.uri))
    found.cache = tmp_path / "models"
    found.files = RunStore(found.store, "r")
    found.clock.drawn = {
        1: Cursor(epoch=0, position=0, size=8, seed=0, order="sequential", digest="")
    }
    found.engines = {
        SCORER: SimpleNamespace(call=Mock(side_effect=calls_of(scorer))),
        REWARD_MODEL: SimpleNamespace(call=Mock(side_effect=calls_of(models))),
    }
    attempt = SimpleNamespace(assignment=None)
    monkeypatch.setattr(stage, "attempted", lambda *_: contextlib.nullcontext(attempt))
    monkeypatch.setattr(reward, "get_run_logger", Mock())
    yield found
    scorer.close()


def calls_of(engine: Any) -> Any:
    def call(method: Any, call_id: object, assignment: object, **arguments: Any) -> Any:
        assert method.__name__ in callable_methods(type(engine))
        return getattr(engine, method.__name__)(**arguments)

    return call


def sampled(run: Mock, texts: list[str]) -> Any:
    """A shard: completions of the first two rows."""
    made = run.engines[SCORER].call(
        Scorer.prompts, None, None, rows=[0, 1], first_group=0, out_key="r/prompts.safetensors"
    )
    tokenizer = load_tokenizer(materialize(run.config.model, run.cache))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    samples = write_batch(
        run.store,
        "r/samples.safetensors",
        {
            "response_ids": [np.asarray(one, dtype=np.int64) for one in ids],
            "status": np.zeros(SAMPLES, dtype=np.int64),
            "sample_id": np.arange(SAMPLES),
            "group_id": made.ref.fetch_numpy(run.store, "group_id")[0].repeat(
                SAMPLES // len(made.ref)
            ),
        },
    )
    return (SimpleNamespace(prompts=made.ref, ref=samples),)


def column(run: Mock, ref: BatchRef, name: str) -> list[float]:
    return ref.fetch_numpy(run.store, name)[0].tolist()


def test_a_reward_model_is_added_to_the_others_by_its_weight(run: Mock) -> None:
    done = reward.scored(run, 1, sampled(run, ["12", "ab", "1b", "2222"]), 1)
    model = column(run, done.ref, "score/reward_model")
    digits = column(run, done.ref, "score/share_of_digits")
    assert digits == [1.0, 0.0, 0.5, 1.0] and len(set(model)) == 4
    expected = [0.5 * one + 2.0 * other for one, other in zip(model, digits, strict=True)]
    assert column(run, done.ref, "reward") == pytest.approx(expected)
    assert done.failures == 0
    assert [one.name for one in done.code] == ["reward_model", "share_of_digits"]
    assert done.code[0].settings["kind"] == "reward_model"
    assert set(done.ref.fetch_list(run.store, "reward_code")) == {code_digest(done.code)}
    # What the models' engine wrote is named by the samples, or retention would call it an orphan.
    (own,) = [key for key in run.store.list("r") if "/reward_model/" in key]
    assert own in done.ref.objects
    assert done.ref.fetch_list(run.store, "extra/reward_model/error") == [None] * SAMPLES


def test_what_the_model_cannot_score_is_failed(run: Mock) -> None:
    done = reward.scored(run, 1, sampled(run, ["12", "1" * 200, "1b", "2"]), 1)
    assert done.failures == 1
    failed = [False, True, False, False]
    for name in ("reward", "score/reward_model", "score/share_of_digits"):
        assert np.isnan(column(run, done.ref, name)).tolist() == failed, name
    assert column(run, done.ref, "status")[1] == SampleStatus.FAILED
    (said,) = [one for one in done.ref.fetch_list(run.store, "extra/reward_model/error") if one]
    assert str(said).endswith("tokens of the reward model, and max_length = 200")


def test_answers_are_compared_within_their_prompt(
    run: Mock, config: GRPOConfig, tmp_path: Path
) -> None:
    (alone,) = config.rewards.models
    engine = RewardModelEngine(
        RewardModelSpec(
            reward_models=(alone.model_copy(update={"pairwise": Pairwise()}),),
            model=config.model,
            model_cache=str(tmp_path / "models"),
            data=config.data,
            max_new_tokens=16,
            store_uri=config.store.uri,
            store_options={},
        )
    )
    (shard,) = sampled(run, ["12", "ab", "1b", "2222"])

    def scored(name: str, **columns: object) -> tuple[list[float], list[object]]:
        written = write_batch(run.store, f"r/{name}.safetensors", columns)
        samples = shard.ref.drop(["status"]).with_columns(written)
        found = engine.score(shard.prompts, samples, f"r/{name}-scores.safetensors")
        errors = found.ref.fetch_list(run.store, "extra/reward_model/error")
        return column(run, found.ref, "score/reward_model"), errors

    groups, good = np.array([0, 0, 1, 1]), np.zeros(SAMPLES, np.int64)
    (one, other, *rest), errors = scored(
        "failed", group_id=groups, status=np.array([0, 0, 0, SampleStatus.FAILED])
    )
    assert one == pytest.approx(1 - other) and one != other and np.isnan(rest).all()
    assert errors[2:] == ["there is no other answer to compare with", "the sample had failed"]
    # Two players of one prompt: each is compared with its own.
    seats = np.array([0, 1, 0, 1])
    scores, _ = scored("players", group_id=np.zeros(SAMPLES, np.int64), player=seats, status=good)
    assert scores[0] + scores[2] == pytest.approx(1.0) == scores[1] + scores[3]
    assert scores[0] + scores[1] != pytest.approx(1.0)


def test_without_reward_models_no_engine_is_asked(run: Mock) -> None:
    run.config = load_recipe(GRPOConfig, "tiny", ["steps=1"])
    assert model_scores(run, ScoredFirst(step=1, number=1, key="key", request=Mock())) is None
    run.engines[REWARD_MODEL].call.assert_not_called()
