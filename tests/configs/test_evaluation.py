"""Suites by name, in old form and new, and what is refused of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.evaluation import FOLDER, EvaluationConfig, suite_names
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe

HELD_OUT = ["evaluation.source.kind=file", "evaluation.source.path=held-out.jsonl"]
ASIDE = ["cluster.pools.test={workers: 1}", "cluster.roles.evaluation=test"]


def tiny(*words: str) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", words)


def suites(*words: str) -> EvaluationConfig:
    found = tiny(*words).evaluation
    assert found is not None
    return found


def test_every_suite_that_comes_with_refrain_is_whole_and_stays_itself() -> None:
    names = [*suite_names(), "rg_countdown"]
    found = EvaluationConfig.model_validate({"suites": names})
    assert list(found.suites) == names
    assert {path.suffix for path in FOLDER.iterdir()} == {".yaml"}
    assert EvaluationConfig.model_validate(found.model_dump(mode="json")) == found
    for suite in found.suites.values():
        assert suite.rewards is not None and suite.prompt is not None and suite.max_new_tokens


def test_settings_of_runs_before_there_were_suites_are_the_suite_held_out() -> None:
    """As run.json of such a run has them, and as its command line was."""
    old = {
        "source": {"kind": "file", "path": "held-out.jsonl"},
        "rows": 12,
        "samples": 2,
        "greedy": False,
    }
    suite = EvaluationConfig.model_validate(old).suites["held_out"]
    assert (suite.rows, suite.samples, suite.greedy, suite.as_run) == (12, 2, False, True)
    found = suites(*HELD_OUT)
    assert found.at_end and not found.before and found.every is None
    assert found.suites["held_out"].rows == 64, "what it was where nothing was said"
    assert suites(*HELD_OUT, "evaluation.suites={rg_countdown: {}}").suites.keys() == {
        "rg_countdown",
        "held_out",
    }


def test_suites_by_name_and_a_change_of_one_stand_in_any_order() -> None:
    words = [
        "evaluation.suites=[gsm8k, gpqa]",
        "evaluation.suites.gsm8k.rows=200",
        "evaluation.suites.gpqa.source.kind=file",
        "evaluation.suites.gpqa.source.path=gpqa.jsonl",
    ]
    found = suites(*words)
    assert list(found.suites) == ["gsm8k", "gpqa"] and found.suites["gsm8k"].rows == 200
    assert found.suites["gpqa"].source.kind == "file"
    assert suites(*reversed(words)) == found


def test_a_suite_is_changed_setting_by_setting_and_a_file_takes_the_hubs_place() -> None:
    found = suites(
        "evaluation.suites.gpqa.source.kind=file",
        "evaluation.suites.gpqa.source.path=gpqa.jsonl",
        "evaluation.suites.gpqa.rows=50",
    ).suites["gpqa"]
    assert found.source.kind == "file" and found.source.path == str(Path("gpqa.jsonl").absolute())
    assert found.source.choices is not None, "its columns are the hub's"
    assert found.rows == 50
    assert found.rewards is not None and found.rewards.functions[0].kind == "choice"


def test_which_versions_are_due() -> None:
    every = EvaluationConfig.model_validate({"suites": ["gsm8k"], "every": 10, "before": True})
    assert [v for v in range(5, 41) if every.due(v, start=5)] == [5, 10, 20, 30, 40]
    at_end = EvaluationConfig.model_validate({"suites": ["gsm8k"]})
    assert not any(at_end.due(v, start=0) for v in range(40))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluation.suites=[gsm9k]"], "There is no suite gsm9k. Name one of aime24, .* rg_TASK"),
        (["evaluation.suites.mine.rows=5"], "evaluation.suites.mine.source: a value is needed"),
        (["evaluation.suites.gsm8k.pass_at=[4]"], "Set samples to 4 or more"),
        (["evaluation.suites.gsm8k.samples=4"], "Set its greedy = false"),
        (["evaluation.suites.gsm8k.temperature=0.5"], "mean nothing"),
        (["evaluation.suites=[gsm8k]", "evaluation.at_end=false"], "nothing would be tested"),
        (["evaluation.suites=[gsm8k]", "evaluation.every=2", "max_staleness=1",
          "algorithm.correction=[{kind: truncate}]"], "Set cluster.roles.evaluation to a pool"),
        (["evaluation.suites=[gsm8k]", "cluster.roles.evaluation=train"],
         "is the pool of the role actor too"),
        (["evaluation.suites={a b: {source: {kind: file, path: x.jsonl}}}"], "becomes part of names"),
        (["evaluation.suites.gsm8k.prompt.system_prompt=x",
          "evaluation.suites.gsm8k.prompt.template=plain"], "needs the chat template"),
        (["evaluation.source={kind: reasoning_gym, task: chain_sum, size: 64, seed: 3, params: "
          "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}"], "rows that are trained on"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny(*words)


def test_a_pool_of_its_own_is_started_and_holds_engines_that_sample() -> None:
    config = tiny("evaluation.suites=[gsm8k]", *ASIDE)
    assert config.evaluates_aside and "test" in config.used_pools
    assert config.sampling_roles == ["rollout", "evaluation"]
    without = tiny(*ASIDE)
    assert not without.evaluates_aside and "test" not in without.used_pools


def test_the_engines_take_the_longest_sequence_of_steps_and_suites() -> None:
    assert tiny().longest_sequence == 128 + 16
    assert tiny("evaluation.suites=[gsm8k]").longest_sequence == 1024 + 1024
    assert tiny(*HELD_OUT).longest_sequence == 128 + 16
