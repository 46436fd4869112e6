"""Settings of several tasks that do not go together are refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.distill import DistillConfig
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from configs.tree import TreeConfig
from tasks.run.suite import Suite
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


def test_what_a_task_has_of_its_own_of_episodes_stands_in_theirs() -> None:
    words = [
        "episodes={environment: {kind: none}, max_turns: 3, max_turn_tokens: 8}",
        f"{TASKS}.letters.environment={{kind: class, path: 'guessing.py:Guessing'}}",
        f"{TASKS}.letters.max_turns=2",
        f"{TASKS}.letters.max_turn_tokens=5",
        f"{TASKS}.letters.group_size=4",
    ]
    config = load_recipe(GRPOConfig, EXAMPLE, words)
    digits, letters = config.played["digits"], config.played["letters"]
    assert (digits.environment.kind, digits.max_turns, digits.max_turn_tokens) == ("none", 3, 8)
    assert (letters.environment.kind, letters.max_turns, letters.max_turn_tokens) == ("class", 2, 5)
    assert config.longest_turn == 8 and config.data.group_sizes(8) == {"digits": 8, "letters": 4}
    assert config.smallest_group == (f"{TASKS}.letters.group_size", 4)
    assert config.samples_per_prompt == 8, "by which samples are numbered"


def test_keys_of_runs_whose_tasks_have_nothing_of_that_stay() -> None:
    """What came later is in the keys of stored objects only where it is set."""
    plain = load_recipe(GRPOConfig, EXAMPLE).data.in_keys()
    digits = plain["source"]["tasks"]["digits"]
    assert sorted(digits) == sorted(
        [
            *("source", "weight", "from_step", "max_new_tokens", "rewards", "prompt_column"),
            *("template", "system_prompt", "prompt_suffix", "chat_template_kwargs", "prefill"),
            "max_prompt_tokens",
        ]
    )
    other = load_recipe(GRPOConfig, EXAMPLE, [f"{TASKS}.digits.group_size=2"]).data.in_keys()
    assert other["source"]["tasks"]["digits"] == {**digits, "group_size": 2}
    assert other["source"]["tasks"]["letters"] == plain["source"]["tasks"]["letters"]


def test_a_suite_of_a_task_is_asked_played_and_scored_as_it(tmp_path: Path) -> None:
    held_out = (
        f"{{kind: function, path: '{ROOT}/examples/two_tasks.py:questions', params: {{rows: 4}}}}"
    )
    words = [
        "episodes={environment: {kind: none}}",
        f"{TASKS}.letters.environment={{kind: class, path: 'guessing.py:Guessing'}}",
        f"{TASKS}.letters.max_new_tokens=9",
        f"evaluation={{suites: {{a: {{source: {held_out}, task: digits}}, "
        f"b: {{source: {held_out}, task: letters}}}}}}",
    ]
    config = load_recipe(GRPOConfig, EXAMPLE, words)
    assert config.evaluation is not None
    suites = {n: Suite.of(config, n, one) for n, one in config.evaluation.suites.items()}
    found = [
        (
            one.config.data.prompt_suffix,
            [reward.label for reward in one.config.rewards.functions],
            one.sampling.max_new_tokens,
            one.config.episodes and one.config.episodes.environment.kind,
        )
        for one in suites.values()
    ]
    assert found == [("DDDD", ["digits"], 16, "none"), ("LLLL", ["letters"], 9, "class")]
    assert not any(one.settings.as_run or one.config.data.tasks for one in suites.values())


GAME = "{kind: class, path: 'guessing.py:Guessing'}"
NO_GAME = "episodes={environment: {kind: none}}"
SUITE = "{kind: function, path: 'two_tasks.py:questions', params: {rows: 4}}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"{TASKS}.digits.group_size=9"], "is above group_size = 8"),
        (
            [f"{TASKS}.digits.group_size=1", "data.quarantine={no_variance: 2}"],
            "data.source.tasks.digits.group_size = 1 has one, which never varies",
        ),
        ([f"{TASKS}.digits.max_turns=2"], "digits.max_turns is of episodes, and episodes = null"),
        ([NO_GAME], "plays nothing, and no task has an environment"),
        (
            [NO_GAME, f"{TASKS}.digits.environment={GAME}", f"{TASKS}.digits.full_turn=counts"],
            "The task digits: episodes.full_turn = counts is about turns",
        ),
        (
            [NO_GAME, f"{TASKS}.digits.environment={GAME}", f"{TASKS}.digits.rewards=null",
             f"{TASKS}.letters.rewards=null", "rewards.functions=[{kind: environment}]"],
            "scores rows without one .kind none.",
        ),
        ([f"{TASKS}.digits.sandbox={{kind: processes, timeout: 3}}"], "no reward of kind unit_tests scores the task"),
        (
            [f"{TASKS}.digits.sandbox={{kind: processes, timeout: 3}}", f"{TASKS}.digits.rewards=null",
             f"{TASKS}.letters.rewards=null", "rewards.functions=[{kind: unit_tests}]"],
            "sandbox.timeout = 3 s is of all tests",
        ),
        ([f"evaluation={{suites: {{a: {{source: {SUITE}, task: words}}}}}}"], "words is no task"),
        (
            [f"evaluation={{suites: {{a: {{source: {SUITE}, task: digits, prompt: {{}}}}}}}}"],
            "it has prompt of its own",
        ),
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
