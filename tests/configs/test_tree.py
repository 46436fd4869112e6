"""What the settings of a run with trees add, and what does not go with them."""

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from configs.tree import TreeConfig
from tests.configs.flow_settings import any_flows_recipes

OF_ONE_TURN = [
    name for name in any_flows_recipes() if load_recipe(GRPOConfig, name).episodes is None
]


@pytest.mark.parametrize("name", OF_ONE_TURN)
def test_every_recipe_without_episodes_is_one_of_trees_too(name: str) -> None:
    config = load_recipe(TreeConfig, name)
    assert config.algorithm.advantage.kind == "tree"
    assert config.segment_tokens * (config.tree.depth - 1) < config.rollout.max_new_tokens


def test_settings_come_back_as_they_were_stored() -> None:
    words = [
        "tree.divergence={kind: drawn, fewest: 1, most: 4}",
        "tree.by=logprob",
        "tree.logprob_weight=-1",
        "tree.stop={answer: '\\\\boxed', repetition: {tokens: 4}}",
        "algorithm.advantage.prefix_weight=once",
    ]
    config = load_recipe(TreeConfig, "tiny", words)
    assert config.algorithm.advantage.kind == "tree", "said or not"
    assert load_recipe(TreeConfig, "tiny", ["tree.divergence.width=3"]).tree.divergence.width == 3
    assert TreeConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        (GRPOConfig, ["algorithm.advantage.kind=tree"], "Run it with refrain tree"),
        (TreeConfig, ["algorithm.advantage.kind=gae"], "algorithm.advantage.kind = tree"),
        (TreeConfig, ["algorithm.advantage.kind=remax"], "algorithm.advantage.kind = tree"),
        (TreeConfig, ["tree.segment_tokens=8"], "Set tree.depth to at most 2"),
        (TreeConfig, ["tree.depth=17"], "Set tree.depth to at most 16"),
        (TreeConfig, ["tree.logprob_weight=2"], "Set tree.by = logprob"),
        (TreeConfig, ["tree.divergence={kind: drawn, fewest: 4}"], "Swap them"),
        (TreeConfig, ["tree.stop.answer=("], "no regular expression"),
        (
            TreeConfig,
            ["episodes={environment: {kind: gymnasium, id: x}}"],
            "Set episodes = null",
        ),
        (
            TreeConfig,
            ["rollout.over_sampling=1.5", "rollout.shards=4"],
            "Set rollout.over_sampling = 1",
        ),
        (
            TreeConfig,
            ["algorithm.advantage.prefix_weight=once", "algorithm.loss.kind=gspo"],
            "Set prefix_weight = per_leaf",
        ),
        (
            TreeConfig,
            [
                "algorithm.advantage.prefix_weight=once",
                "algorithm.loss={kind: sapo, level: sequence}",
            ],
            "Set prefix_weight = per_leaf",
        ),
        (
            TreeConfig,
            [
                "algorithm.advantage.prefix_weight=once",
                "algorithm.aggregation=seq-mean-token-mean",
            ],
            "algorithm.aggregation = token-mean",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(model, words, said) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(model, "tiny", words)
    assert said in str(refused.value)
