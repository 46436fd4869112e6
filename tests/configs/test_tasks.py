"""Settings of several tasks that do not go together are refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.distill import DistillConfig
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from configs.tree import TreeConfig
from tests.flows.conftest import ROOT

EXAMPLE = str(ROOT / "examples/two_tasks.yaml")
TASKS = "data.source.tasks"


def test_a_task_says_what_it_has_of_its_own() -> None:
    config = load_recipe(GRPOConfig, EXAMPLE, [f"{TASKS}.letters.max_prompt_tokens=9"])
    tasks = config.data.tasks
    assert [one.prompt_suffix for one in tasks.values()] == ["DDDD", "LLLL"]
    assert [one.max_prompt_tokens for one in tasks.values()] == [32, 9]
    assert [one.template for one in tasks.values()] == ["plain", "plain"]
    assert config.data.scored_by("digits") == [tasks["digits"]]
    assert "tasks" in config.features


def test_one_file_may_hold_all_tasks(tmp_path: Path) -> None:
    words = [
        "data.source={kind: tasks, source: {kind: file, path: all.jsonl, where: {level: 1}}, "
        "task_column: about, tasks: {sums: {}, words: {prompt_column: text}}}"
    ]
    sums, texts = load_recipe(GRPOConfig, "tiny", words).data.tasks.values()
    assert sums.source.model_dump()["where"] == {"level": 1, "about": "sums"}
    assert (sums.prompt_column, texts.prompt_column) == ("question", "text")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"{TASKS}.digits.rewards=[digit]"], "names digit, and the rewards are digits, letters"),
        ([f"{TASKS}.digits.rewards=[]"], "digits.rewards is empty"),
        ([f"{TASKS}.digits.rewards=[letters]"], "The reward digits scores no task"),
        ([f"{TASKS}.digits.weight=-1"], "greater than or equal to 0"),
        ([f"{TASKS}.digits.from_step={{0: 1}}"], "steps, counted from 1"),
        (
            [f"{TASKS}.digits.from_step={{5: 0}}", f"{TASKS}.letters.from_step={{3: 0}}"],
            "No task has a weight from step 5 on",
        ),
        ([f"{TASKS}.digits.max_prompt_tokens=99"], "is above data.max_prompt_tokens = 32"),
        ([f"{TASKS}.digits.max_new_tokens=99"], "is above rollout.max_new_tokens = 16"),
        (
            [f"{TASKS}.digits.max_new_tokens=9", "algorithm.shaping.overlong={buffer: 4}"],
            "Set algorithm.shaping.overlong.max_tokens",
        ),
        ([f"{TASKS}.digits.system_prompt=Count."], "The task digits: .*needs the chat template"),
        ([f"{TASKS}.digits.source=null"], "The task digits has no rows"),
        (["data.epochs=2"], "Set data.epochs = null"),
        (["data.order=difficulty"], "data.order = difficulty is of one task"),
        (["evaluation={source: {kind: file, path: x.jsonl}}"], "The suite held_out would be asked"),
        (["data.source.curriculum={floor: 0}"], "greater than 0"),
        ([f"{TASKS}={{}}"], "data.source.tasks is empty"),
        (
            ["rewards.functions=[{kind: reasoning_gym}]", f"{TASKS}.digits.rewards=null",
             f"{TASKS}.letters.rewards=null"],
            "scores the problems of one reasoning-gym task",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_recipe(GRPOConfig, EXAMPLE, words)
    assert "\n" not in str(caught.value)


def test_comparing_within_tasks_needs_some() -> None:
    with pytest.raises(ConfigError, match=r"normalize = task compares within each of several"):
        load_recipe(GRPOConfig, "tiny", ["algorithm.advantage.normalize=task"])


def test_flows_of_one_task_say_so() -> None:
    with pytest.raises(ConfigError, match="refrain tree trains on one task"):
        load_recipe(TreeConfig, EXAMPLE, [])
    with pytest.raises(ConfigError, match="distillation trains on one task"):
        load_recipe(DistillConfig, EXAMPLE, ["teachers={a: {model: {kind: random}}}"])


def test_a_run_of_one_task_has_the_settings_that_it_had() -> None:
    data = load_recipe(GRPOConfig, "tiny", []).data
    assert data.tasks == {} and data.scored_by("share_of_digits") == [data]
    assert "tasks" not in data.model_dump()["source"]
