"""What a DAPO run's settings add, which are the paper's unless told, and what is refused."""

from pathlib import Path

import pytest

from configs.dapo import DAPOConfig
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.run.opening import check_unchanged
from tests.configs.flow_settings import any_flows_recipes


@pytest.mark.parametrize("name", any_flows_recipes())
def test_every_recipe_is_one_of_dapo_too(name: str) -> None:
    config = load_recipe(DAPOConfig, name)
    (rule,) = config.algorithm.selection
    assert (rule.kind, config.algorithm.kl.coefficient) == ("informative", 0) or name != "tiny"
    assert DAPOConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_defaults_are_the_papers() -> None:
    algorithm = load_recipe(DAPOConfig, "tiny", ["rollout.max_new_tokens=40"]).algorithm
    assert algorithm.loss.model_dump() == {
        "kind": "clipped",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
        "ratio_cap": None,
        "level": "token",
    }
    assert (algorithm.aggregation, algorithm.advantage.kind) == ("token-mean", "grpo")
    (rule,) = algorithm.selection
    assert rule.model_dump()["rewards"] == "given"  # accuracy, before the penalty for length
    assert algorithm.shaping.overlong is not None
    assert (algorithm.shaping.overlong.buffer, algorithm.shaping.overlong.factor) == (8, 1.0)
    shortest = load_recipe(DAPOConfig, "tiny", ["rollout.max_new_tokens=1"]).algorithm
    assert shortest.shaping.overlong is not None and shortest.shaping.overlong.buffer == 1


def test_what_is_given_stands() -> None:
    words = ["algorithm.loss.clip_high=0.3", "algorithm.shaping.truncated=mask"]
    algorithm = load_recipe(DAPOConfig, "tiny", words).algorithm
    assert algorithm.loss.model_dump()["clip_high"] == 0.3
    assert algorithm.loss.model_dump()["dual_clip"] is None
    assert algorithm.shaping.overlong is not None and algorithm.shaping.truncated == "mask"
    words = ["algorithm.loss.kind=gspo", "algorithm.shaping.overlong=null"]
    algorithm = load_recipe(DAPOConfig, "tiny", words).algorithm
    assert (algorithm.loss.kind, algorithm.shaping.overlong) == ("gspo", None)


def test_numbers_of_groups_hold_for_any_number_of_rounds() -> None:
    words = ["dynamic_sampling.over_sampling=1.3", "prompts_per_step=5"]
    few = load_recipe(DAPOConfig, "tiny", [*words, "dynamic_sampling.max_rounds=1"])
    many = load_recipe(DAPOConfig, "tiny", [*words, "dynamic_sampling.max_rounds=1000"])
    assert few.groups_at_once == many.groups_at_once == 7
    assert few.groups_numbered == many.groups_numbered == 7000
    assert (few.most_rounds, many.most_rounds) == (1, 1000)
    assert not few.over_samples
    plain = load_recipe(GRPOConfig, "tiny")
    assert plain.groups_numbered == plain.groups_at_once == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.over_sampling=1.5", "rollout.shards=4"], "Set rollout.over_sampling = 1; more"),
        (["algorithm.selection=[]"], "Add {kind: informative} to algorithm.selection"),
        (["algorithm.selection=[{kind: best_of, best: 2}]"], "Add {kind: informative}"),
        (["algorithm.selection=[{kind: best_of, best: 0}]"], "keeps no sample. Set best = 1"),
        (["group_size=1"], "Set group_size to 2 or more"),
        (["algorithm.advantage.kind=remax"], "which this flow does not sample"),
        (["algorithm.advantage.kind=gae"], "Run it with refrain ppo"),
        (["dynamic_sampling.max_rounds=0"], "dynamic_sampling.max_rounds = 0"),
        (["dynamic_sampling.over_sampling=0.5"], "dynamic_sampling.over_sampling = 0.5"),
        (["dynamic_sampling.on_shortage=wait"], "dynamic_sampling.on_shortage = 'wait'"),
    ],
)
def test_a_wrong_setting_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="^[^\n]+$") as error:
        load_recipe(DAPOConfig, "tiny", words)
    assert said in str(error.value)


def test_other_flows_have_no_rounds() -> None:
    with pytest.raises(ConfigError, match="there is no such setting"):
        load_recipe(GRPOConfig, "tiny", ["dynamic_sampling.max_rounds=2"])


def test_a_form_has_the_settings_of_its_own_flow() -> None:
    forms = {model: model.model_json_schema() for model in (DAPOConfig, GRPOConfig)}
    with_rounds = [one for one, form in forms.items() if "dynamic_sampling" in form["properties"]]
    assert with_rounds == [DAPOConfig]
    limits = forms[DAPOConfig]["$defs"]["DynamicSampling"]["properties"]
    assert all(field["description"] for field in limits.values())


def test_its_rounds_may_change_on_resuming(tmp_path: Path) -> None:
    flow, files = "flows.dapo:dapo", RunStore(Store(f"file://{tmp_path}"), "mine")
    config = load_recipe(DAPOConfig, "tiny-dapo")
    files.write_run({"config": config.model_dump(mode="json"), "flow": flow})
    for word in ("dynamic_sampling.max_rounds=3", "dynamic_sampling.on_shortage=train"):
        check_unchanged(files, load_recipe(DAPOConfig, "tiny-dapo", [word]), flow)
    with pytest.raises(
        ConfigError,
        match=r"dynamic_sampling\.over_sampling\. .*may change: .*dynamic_sampling\.max_rounds",
    ):
        check_unchanged(
            files,
            load_recipe(DAPOConfig, "tiny-dapo", ["dynamic_sampling.over_sampling=1.75"]),
            flow,
        )
