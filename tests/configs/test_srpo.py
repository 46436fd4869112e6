"""What the settings of an SRPO run add, and what does not go with them."""

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from configs.srpo import SRPOConfig
from flows.srpo import srpo


def test_what_is_not_said() -> None:
    config = load_recipe(SRPOConfig, "tiny-srpo")
    assert config.encoder.kind == "projection"
    (rule,) = config.algorithm.selection
    assert rule.model_dump() == {"kind": "success_rate", "low": 0.1, "high": 0.9, "success": 1.0}
    assert config.sharded_stages == load_recipe(GRPOConfig, "tiny-srpo").sharded_stages + 1
    assert config.keeps_frames and not load_recipe(GRPOConfig, "tiny-srpo").keeps_frames
    assert load_recipe(SRPOConfig, "tiny-srpo", ["episodes.sees=text"]).keeps_frames
    assert (
        load_recipe(SRPOConfig, "tiny-srpo", ["algorithm.selection=[]"]).algorithm.selection == ()
    )
    assert SRPOConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_form_has_every_setting_with_its_meaning() -> None:
    schema = parameter_schema(srpo).model_dump_for_openapi()
    for words in ([], ["encoder={kind: transformers, model: some/model}"]):
        config = load_recipe(SRPOConfig, "tiny-srpo", words).model_dump(mode="json")
        validate({"config": config}, schema, raise_on_error=True)
    own = {"SRPOConfig", "ProgressConfig", "ProjectionEncoder", "VisionEncoder"}
    found = {name: each for name, each in schema["definitions"].items() if name in own}
    assert "ProgressConfig" in found
    for definition in found.values():
        for name, field in definition["properties"].items():
            target = schema["definitions"].get(field.get("$ref", "").rpartition("/")[2], {})
            assert field.get("title") or target.get("title"), name
            assert field.get("description") or target.get("description"), name


def test_the_encoder_has_the_pool_of_rewards_or_its_own() -> None:
    assert load_recipe(SRPOConfig, "tiny-srpo").used_pools == {"train", "rollout", "cpu"}
    own = ["cluster.pools.eyes.workers=1", "cluster.roles.encoder=eyes"]
    assert "eyes" in load_recipe(SRPOConfig, "tiny-srpo", own).used_pools


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["episodes=null", "rewards.functions=[{kind: math}]"], "run it with refrain grpo"),
        (["episodes.environment={kind: textarena, id: x}"], "Set it to gymnasium, or to class"),
        (["episodes.players=2"], "Set episodes.players = 1"),
        (["rollout.over_sampling=1.5", "rollout.shards=4"], "Set rollout.over_sampling = 1"),
        (["algorithm.advantage.kind=remax"], "Set algorithm.advantage.kind = grpo"),
        (
            ["algorithm.selection=[{kind: success_rate, low: 0.9, high: 0.1}]"],
            "Set low below high",
        ),
        (["episodes.max_turn_tokens=null"], "Set it, or full_turn = ends"),
        (["encoder={kind: transformers}"], "model"),
        (["progress.ceiling=1.0"], "ceiling"),
        (
            [
                "cluster.share_devices=true",
                "cluster.roles.rollout=train",
                "cluster.roles.encoder=train",
                "encoder={kind: transformers, model: some/model}",
            ],
            "devices of pool train back. Set cluster.roles.encoder to another pool",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe(SRPOConfig, "tiny-srpo", words)
