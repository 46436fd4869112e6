"""A run that goes on where what scores it means something else by now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from engines.meanings import GREEDY, VERSIONS, changes, meanings_of
from storage.objects.store import Store
from storage.runs.commit_log import Commit
from storage.runs.curves import shown
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef
from storage.tracking.plots import progress_png
from tasks.run.meaning_changes import MEANINGS as FIELD
from tasks.run.meaning_changes import marked, meaning_metrics, meaning_sentence
from tasks.run.suite import Suite

MATH = "rewards.functions=[{kind: math, name: right}]"
CHOICE = "rewards.functions=[{kind: choice}]"
TESTS = "rewards.functions=[{kind: unit_tests}]"
HELD_OUT = "evaluation.source={kind: reasoning_gym, task: chain_sum, size: 8, seed: 9}"


def settings(*words: str) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", words)


def commit(step: int, meanings: dict[str, int] | None = None) -> Commit:
    weights = [
        WeightsRef(key=f"r/weights/v{n:06d}", digest="d", version=n, nbytes=0)
        for n in (step - 1, step)
    ]
    return Commit(
        step=step,
        parent=step - 1,
        version_in=weights[0],
        version_out=weights[1],
        meanings=meanings or {},
    )


@pytest.fixture
def files() -> RunStore:
    return RunStore(Store("memory://meanings"), "r")


@pytest.mark.parametrize(
    ("words", "name"),
    [(MATH, "math"), (CHOICE, "choice"), (TESTS, "unit_tests"), (HELD_OUT, GREEDY)],
)
def test_a_run_of_an_older_meaning_is_told_and_marked_once(
    files: RunStore, words: str, name: str
) -> None:
    config, last = settings(words), commit(4)  # of an older Refrain, whose commits say nothing
    said = meaning_sentence(files, config, last, "r")
    assert said is not None
    assert f"{name} (version 1, now {VERSIONS[name]})" in said
    assert "since step 4: from step 5 on, which is marked" in said
    assert "refrain rescore r --reward" in said
    metrics = meaning_metrics(last, config)
    assert metrics == {f"meaning_changed/{name.replace(' ', '_')}": VERSIONS[name]}
    assert shown(metrics) == metrics  # curves.json keeps the mark
    assert marked({"reward/mean": 1.0, **metrics}) == f"{name.replace(' ', '_')} {VERSIONS[name]}"
    again = commit(5, VERSIONS)
    assert meaning_sentence(files, config, again, "r") is None
    assert meaning_metrics(again, config) == {}


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"model_type": "gemma3n", "final_logit_softcapping": 30.0}, True),
        ({"model_type": "granite", "logits_scaling": 8.0}, True),
        ({"model_type": "cohere", "logit_scale": 0.0625}, True),
        ({"model_type": "minicpm3", "dim_model_base": 256}, True),
        ({"model_type": "phi"}, True),
        ({"model_type": "llama"}, False),
        ({"model_type": "gemma3_text", "final_logit_softcapping": None}, False),
        ({"model_type": "granite", "logits_scaling": 1.0}, False),
    ],
)
def test_a_run_is_told_whose_log_probs_left_out_a_part_of_the_head(
    files: RunStore, tmp_path: Path, facts: dict[str, object], told: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**facts, "hidden_size": 64}))
    config, old = settings(f"model={{kind: pretrained, path: {tmp_path}}}"), commit(4)
    said = meaning_sentence(files, config, old, "r")
    assert (said is not None) == told
    assert meaning_metrics(old, config) == ({"meaning_changed/log-probs": 2.0} if told else {})
    if said is not None:
        assert "What log-probs (version 1, now 2) are has changed since step 4" in said
        assert "From step 5 on, which is marked" in said
    assert meaning_sentence(files, config, commit(5, VERSIONS), "r") is None
    assert meaning_metrics(commit(5, VERSIONS), config) == {}


def test_the_sentence_names_the_reward_and_the_evaluations(files: RunStore) -> None:
    said = meaning_sentence(files, settings(MATH, HELD_OUT), commit(2), "parent")
    assert said is not None
    assert "greedy evaluation (version 1, now 2) and math (version 1, now 3)" in said
    assert "refrain rescore parent --reward right" in said
    assert "refrain evaluate parent --suite NAME --versions all" in said


def test_nothing_is_said_of_what_means_the_same(files: RunStore) -> None:
    assert meaning_sentence(files, settings(), commit(3), "r") is None
    assert meaning_metrics(commit(3), settings()) == {}


def test_a_run_without_a_step_began_with_what_run_json_says(files: RunStore) -> None:
    files.write_run({FIELD: VERSIONS})
    assert meaning_sentence(files, settings(MATH), None, "r") is None
    files.write_run({"flow": "flows.grpo:grpo"})
    said = meaning_sentence(files, settings(MATH), None, "r")
    assert said is not None
    assert "since the run began" in said


def test_suites_added_later_are_no_change(files: RunStore) -> None:
    """Commits have the versions of everything, used or not."""
    assert meaning_sentence(files, settings(MATH, HELD_OUT), commit(3, VERSIONS), "r") is None


def test_evaluations_of_two_meanings_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(HELD_OUT)
    assert config.evaluation is not None
    suite = Suite.of(config, "held_out", config.evaluation.suites["held_out"])
    now = suite.manner(None)
    monkeypatch.setitem(VERSIONS, GREEDY, VERSIONS[GREEDY] + 1)
    assert suite.manner(None) != now
    monkeypatch.setitem(VERSIONS, GREEDY, 1)
    assert suite.meanings == {}


def test_the_picture_of_a_marked_curve() -> None:
    metrics = [{"reward/mean": 0.1 * step} for step in range(4)]
    plain = progress_png([1, 2, 3, 4], metrics)
    metrics[2]["meaning_changed/math"] = 2.0
    assert progress_png([1, 2, 3, 4], metrics) != plain


def test_meanings_of_settings_of_an_older_refrain() -> None:
    old = {"rewards": {"functions": [{"kind": "math"}, {"kind": "function"}]}, "evaluation": None}
    assert meanings_of(old) == {"math": VERSIONS["math"]}
    (change,) = changes({}, meanings_of(old))
    assert (change.name, change.before, change.now) == ("math", 1, VERSIONS["math"])
