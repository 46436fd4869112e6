"""Settings with which no run begins, and with which stored ones are read all the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from configs.grpo import GRPOConfig, check_finite, check_new_run, warnings_of
from configs.recipe import load_recipe
from tests.configs.flow_settings import any_flows_recipes

TRUNCATE = "algorithm.correction=[{kind: truncate}]"
BYPASS = "algorithm.ratio_against=rollout_logprobs"
SPECULATIVE = "rollout.engine_args={speculative_config: {method: ngram, num_speculative_tokens: 3}}"


def tiny(words: Sequence[str]) -> GRPOConfig:
    """The recipe `tiny`, changed by words: reading it never asks what is asked of a new run."""
    return load_recipe(GRPOConfig, "tiny", list(words))


@pytest.mark.parametrize("name", any_flows_recipes())
def test_the_recipes_may_begin(name: str) -> None:
    config = load_recipe(GRPOConfig, name)
    check_new_run(config)
    check_finite(config)
    assert warnings_of(config) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.top_k=2", TRUNCATE], "rollout.top_k = 2 draws from a part .* Set rollout.sampling_mask = true, .* or rollout.top_p = 1, rollout.top_k = 0 and rollout.min_p = 0, or algorithm.correction = "),
        (["rollout.top_p=0.9", TRUNCATE], r"rollout\.top_p = 0\.9 draws"),
        (["rollout.min_p=0.1", TRUNCATE], r"rollout\.min_p = 0\.1 draws"),
        (["rollout.top_p=0.9", "rollout.top_k=40", TRUNCATE], "top_p = 0.9 and rollout.top_k = 40 draws"),
        (["rollout.top_k=1", "algorithm.correction=[{kind: veto}]"], "and algorithm.correction compares"),
        (["rollout.top_p=0.5", BYPASS], "algorithm.ratio_against = rollout_logprobs compares"),
        (["rollout.top_p=0.5", "algorithm.loss.kind=decoupled"], "algorithm.loss.kind = decoupled compares"),
        (["rollout.stop=['']"], "an empty string, which every text has"),
        (["rollout.stop=[END, '']"], "an empty string"),
        (["rollout.engine=vllm", "rollout.engine_args={structured_outputs_config: {}}"], "structured_outputs_config is set by Refrain itself. Remove it"),
        ([SPECULATIVE, "rollout.min_p=0.1"], r"rollout\.min_p = 0\.1, and vLLM .* Set rollout\.min_p = 0"),
        (["rollout.engine=vllm", "rollout.speculative={}", "rollout.top_k=9", "rollout.sampling_mask=true"], "Set both to false"),
    ],
)  # fmt: skip
def test_no_run_begins_with_these(words: list[str], said: str) -> None:
    config = tiny(words)
    with pytest.raises(ValueError, match=said) as caught:
        check_new_run(config)
    assert "\n" not in str(caught.value)
    assert GRPOConfig.model_validate(config.model_dump(mode="json")) == config, "it can be read"


@pytest.mark.parametrize("cut", ["rollout.top_k=2", "rollout.top_p=0.9", "rollout.min_p=0.1"])
@pytest.mark.parametrize("use", [TRUNCATE, BYPASS, "algorithm.loss.kind=decoupled"])
def test_with_the_words_that_were_left_each_may_begin(cut: str, use: str) -> None:
    config = tiny([cut, use, "rollout.sampling_mask=true", "rollout.engine=transformers"])
    check_new_run(config)
    assert warnings_of(config) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.engine=transformers"], "here all are left. Set one of them, or rollout.sampling_mask = false"),
        (["rollout.engine=transformers", "rollout.top_k=1"], "no token would train"),
        (["rollout.engine=vllm", "rollout.top_p=0.9"], "Set rollout.top_k to more than"),
    ],
)  # fmt: skip
def test_words_that_were_left_are_refused_where_they_are_none(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny(["rollout.sampling_mask=true", *words])


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_agents_may_ask_for_grammars_where_nothing_else_cuts(engine: str) -> None:
    agent = "episodes={environment: {kind: agent, path: agent.py:play}}"
    rewards = "rewards.functions=[{kind: environment}]"
    words = [agent, rewards, "data.template=chat", f"rollout.engine={engine}"]
    check_new_run(tiny([*words, "rollout.sampling_mask=true"]))
    if engine == "vllm":
        with pytest.raises(ValueError, match="Set rollout.top_k to more than"):
            tiny([*words, "rollout.sampling_mask=true", "rollout.top_p=0.9"])


@pytest.mark.parametrize("words", [["rollout.top_k=2"], ["rollout.top_p=0.95"]])
def test_a_part_of_the_distribution_without_a_correction_is_a_warning(words: list[str]) -> None:
    config = tiny(words)
    check_new_run(config)
    (said,) = warnings_of(config)
    assert "the gradient is biased" in said and words[0].replace("=", " = ") in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rewards.functions.0.weight=nan"], "rewards.functions.0.weight = nan"),
        (["rewards.functions.0.weight=.inf"], "rewards.functions.0.weight = inf"),
        (["train.learning_rate=.inf"], "train.learning_rate = inf"),
        (["rollout.deadline=.inf"], "rollout.deadline = inf"),
        (["algorithm.kl.coefficient=.inf"], "algorithm.kl.coefficient = inf"),
        (["rollout.engine_args={rope: {theta: [1.0, .nan]}}"], "rollout.engine_args.rope.theta.1 = nan"),
        (["guards=[{name: a, metric: train/loss, above: -.inf}]"], "guards.0.above = -inf"),
    ],
)  # fmt: skip
def test_a_number_that_is_none_is_named(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match="which is no finite number") as caught:
        check_finite(tiny(words))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("word", ["steps", "group_size", "seed", "rollout.max_new_tokens"])
def test_a_number_beyond_what_is_stored_is_named(word: str) -> None:
    with pytest.raises(ValueError, match=f"^{word} = 99999999999999999999 is beyond"):
        check_finite(tiny([f"{word}=99999999999999999999"]))


def test_what_is_computed_again_needs_layers_that_compute_again() -> None:
    (said,) = warnings_of(tiny(["train.recompute=selective"]))
    assert said.startswith("train.recompute = selective is about layers")
    words = ["train.recompute=selective", "train.gradient_checkpointing=0.5"]
    assert warnings_of(tiny(words)) == []


def test_a_pool_without_a_role_is_told() -> None:
    (said,) = warnings_of(tiny(["cluster.pools.extra.workers=2"]))
    assert said.startswith("cluster.pools.extra has no role, so its workers are not started. Set")
    assert warnings_of(tiny(["cluster.pools.extra.workers=2", "cluster.roles.reward=extra"])) == []
    both = ["cluster.pools.extra.workers=2", "cluster.roles.evaluation=extra"]
    assert len(warnings_of(tiny(both))) == 1  # nothing is evaluated
