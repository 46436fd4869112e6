"""Whole runs with many methods at once: each choice is in the commits and in MLflow."""

from __future__ import annotations

import itertools

import pytest

from configs.algorithm.algorithm import AlgorithmConfig
from storage.runs.commit_log import Commit
from storage.tracking.tracker import flatten
from tests.engines.method_cases import BY_GRPO, LOSSES, correction_recipes, covering, words
from tests.flows.conftest import Launch, Launched

pytestmark = pytest.mark.cluster

WITHOUT_CRITIC = list(BY_GRPO)
LONGEST = max(len(WITHOUT_CRITIC), len(LOSSES), len(list(correction_recipes())))


def check_records(run: Launched) -> list[Commit]:
    """Commits and MLflow say what run.json says; no figure is missing."""
    from mlflow import MlflowClient

    written = run.files.read_run()
    assert written is not None
    settings = written["config"]
    recipe = AlgorithmConfig.model_validate(settings["algorithm"])
    commits = run.commits()
    for commit in commits:
        made = AlgorithmConfig.model_validate(commit.algorithm)
        if recipe.kl.controller == "adaptive":  # the coefficient is the step's own
            made = made.model_copy(update={"kl": recipe.kl})
        assert made == recipe
        assert None not in commit.metrics.values(), commit.metrics
        assert commit.metrics["train/skipped_steps"] == 0
    client = MlflowClient(f"sqlite:///{run.folder}/.refrain/mlflow.db")
    (page,) = client.search_runs([client.get_experiment_by_name("refrain").experiment_id])
    chosen = flatten({"algorithm": settings["algorithm"]})
    assert {name: page.data.params.get(name) for name in chosen} == chosen
    shown = client.get_metric_history(page.info.run_id, "train/loss")
    assert [point.value for point in shown] == [c.metrics["train/loss"] for c in commits]
    for name in commits[-1].metrics:
        assert name in page.data.metrics
    return commits


@pytest.mark.slow
def test_a_run_of_many_methods_is_on_record(launch: Launch) -> None:
    recipe = covering(WITHOUT_CRITIC.index("remax"))
    recipe["kl"] = {"coefficient": 0.05, "placement": "reward", "controller": "adaptive"}
    recipe["correction"] = [{"kind": "truncate", "normalize": True}, {"kind": "reject"}]
    recipe["selection"] = [{"kind": "best_of", "best": 2, "worst": 1}]
    run = launch("tiny", "steps=2", *words(recipe))
    code, out = run.end()
    assert code == 0, out
    commits = check_records(run)
    store = run.files.store
    for commit in commits:
        for name in ("weight_eff_sample_size", "kl", "k3_kl", "log_ppl_diff", "weight_oob_ratio"):
            assert f"correction/{name}" in commit.metrics
        for name in ("correction_effective_sample_size", "kl_rollout_k3", "correction_left_out"):
            assert f"train/{name}" in commit.metrics
        assert commit.metrics["selection/samples_left_out"] > 0
        greedy, batch = commit.refs["baselines"], commit.refs["batch"]
        assert len(greedy) == 4
        rewards = dict(
            zip(
                greedy.fetch_numpy(store, "group_id")[0].tolist(),
                greedy.fetch_numpy(store, "reward")[0].tolist(),
                strict=True,
            )
        )
        groups = batch.fetch_numpy(store, "group_id")[0].tolist()
        assert batch.fetch_numpy(store, "baseline_reward")[0].tolist() == [
            rewards[group] for group in groups
        ]
    first, second = (AlgorithmConfig.model_validate(c.algorithm).kl.coefficient for c in commits)
    assert second != first == 0.05


@pytest.mark.slow
@pytest.mark.parametrize("position", range(LONGEST))
def test_every_method_is_part_of_a_whole_run(position: int, launch: Launch) -> None:
    run = launch("tiny", "steps=2", "train.mini_batches=2", *words(covering(position)))
    code, out = run.end()
    assert code == 0, out
    check_records(run)


def test_whole_runs_cover_every_method() -> None:
    recipes = [covering(position) for position in range(LONGEST)]
    assert {recipe["advantage"]["kind"] for recipe in recipes} == set(WITHOUT_CRITIC)
    assert {recipe["loss"]["kind"] for recipe in recipes} == set(LOSSES)
    steps = list(itertools.chain.from_iterable(recipe["correction"] for recipe in recipes))
    assert all(recipe["correction"][0] in steps for _, recipe in correction_recipes())
    for recipe in recipes:
        AlgorithmConfig.model_validate(recipe)
